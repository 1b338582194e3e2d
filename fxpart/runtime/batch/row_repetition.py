"""Repetition of rows for batches that do not divide over the ranks.

Ranks take equal parts of each microbatch. A microbatch with too few rows for that is concatenated
with itself until it divides. A mean over rows does not change then, nor do its gradients. A program
records whether that holds for it (``ProgramSpec.repeat_rows``). If it does not hold or is unknown,
the batch is rejected (FXP114).
"""

from __future__ import annotations

import math

import torch

from fxpart.errors import FxpartError, error


def count_repeats(rows: int, multiple: int) -> int:
    """Return how often ``rows`` are repeated so that ``multiple`` divides them; 1 if it does."""
    return multiple // math.gcd(rows, multiple)


def split_rows(rows: int, multiple: int, microbatches: int) -> tuple[int, ...]:
    """Return the rows of each microbatch; all but the last are multiples of ``multiple``.

    If several microbatches are allowed, the rows that divide are split as evenly as possible and
    the remainder is a microbatch of its own, so that few rows are repeated.
    """
    units, rest = divmod(rows, multiple)
    if rest and (units == 0 or microbatches == 1):
        return (rows,)
    count = min(microbatches - bool(rest), units)
    small, more = divmod(units, count)
    even = [(small + 1) * multiple] * more + [small * multiple] * (count - more)
    return (*even, rest) if rest else tuple(even)


def repeat_rows(tensor: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Return the tensor concatenated with itself along the dim."""
    return tensor if count == 1 else torch.cat([tensor] * count, dim)


def drop_repeated_rows(tensor: torch.Tensor, count: int, dim: int | None) -> torch.Tensor:
    """Return the first of ``count`` equal parts along the dim of the rows, if there is one."""
    if count == 1 or dim is None:
        return tensor
    return tensor.narrow(dim, 0, tensor.shape[dim] // count)


def make_repetition_error(rows: int, multiple: int) -> FxpartError:
    """Return FXP114 for a batch whose rows would have to be repeated but must not be."""
    return error(
        "FXP114",
        where=f"a batch of {rows} rows",
        why=f"{multiple} ranks take equal parts of each microbatch, and the rows cannot be "
        "repeated: the results may depend on the number of rows (a sum, batch statistics)",
        fix=f"pass a multiple of {multiple} rows (drop_last=True in a DataLoader drops a smaller "
        "last batch), or compile with dp=1",
    )
