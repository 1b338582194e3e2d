"""Batches whose rows do not divide over the ranks that share them: their rows are repeated.

Ranks take equal parts of each microbatch. Where a microbatch has too few rows for that, it is
concatenated with itself until it divides. A mean over rows does not change then, and neither do the
gradients of one. Whether that holds for a program is measured: the microbatch is run forward once
more with twice as many repetitions, and everything has to be equal to rounding (FXP114).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.runtime.batch import Cut


def times(rows: int, multiple: int) -> int:
    """Return how often ``rows`` are repeated so that ``multiple`` divides them; 1 if it does."""
    return multiple // math.gcd(rows, multiple)


def divide(rows: int, multiple: int, microbatches: int) -> tuple[int, ...]:
    """Return the rows of each microbatch, at most so many; all but the last divide.

    Where several microbatches are allowed, the rows that divide are split as evenly as possible and
    the rest is a microbatch of its own, so that few rows are repeated.
    """
    units, rest = divmod(rows, multiple)
    if rest and (units == 0 or microbatches == 1):
        return (rows,)
    count = min(microbatches - bool(rest), units)
    small, more = divmod(units, count)
    even = [(small + 1) * multiple] * more + [small * multiple] * (count - more)
    return (*even, rest) if rest else tuple(even)


def repeat(tensor: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Return the tensor concatenated with itself along the dim."""
    return tensor if count == 1 else torch.cat([tensor] * count, dim)


def undo(tensor: torch.Tensor, count: int, dim: int | None) -> torch.Tensor:
    """Return the first of ``count`` equal parts along the dim of the rows, if there is one."""
    if count == 1 or dim is None:
        return tensor
    return tensor.narrow(dim, 0, tensor.shape[dim] // count)


@dataclass(frozen=True)
class Results:
    """What a microbatch gives: losses and outputs, and what buffers become, in a fixed order.

    statistics: whether the forward changes floating-point buffers, such as running statistics.
    """

    values: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor] = ()
    statistics: bool = False


def check_equal(once: Results, twice: Results, cut: Cut, multiple: int) -> None:
    """Raise FXP114 unless repeating the rows twice as often gives the same results.

    cut: the batch of ``once``. Statistics of a single row are refused: they do not depend on how
    often it is repeated, and are undefined without.
    """
    alone = any(n == 1 < count for n, count in zip(cut.rows, cut.repeats, strict=True))
    same = [
        first.shape == second.shape and _close(first, second, tolerance)
        for tolerance, pairs in (
            (_tolerance, zip(once.values, twice.values, strict=True)),
            (_rounding, zip(once.buffers, twice.buffers, strict=True)),
        )
        for first, second in pairs
    ]
    if all(same) and not (alone and once.statistics):
        return
    raise error(
        "FXP114",
        where=f"a batch of {sum(cut.rows)} rows",
        why=f"{multiple} ranks take equal parts of each microbatch, and rows cannot be repeated to "
        "divide: the results depend on the number of rows (a sum, statistics of the batch, noise)",
        fix=f"give a multiple of {multiple} rows (drop_last=True in a DataLoader drops a smaller "
        "last batch), or compile with dp=1",
    )


def _close(
    first: torch.Tensor, second: torch.Tensor, tolerance: Callable[[torch.dtype], float]
) -> bool:
    """Whether two results are equal to a part of the largest number among them."""
    if not first.is_floating_point():
        return torch.equal(first, second)
    allowed = tolerance(first.dtype)
    first, second = first.double(), second.double()
    finite = second[second.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(first, second, rtol=allowed, atol=allowed * scale, equal_nan=True)


def _tolerance(dtype: torch.dtype) -> float:
    """Of losses, which may be small differences of large numbers: 1e-4 in float32."""
    return min(1000 * torch.finfo(dtype).eps, 0.02)


def _rounding(dtype: torch.dtype) -> float:
    """Of buffers. Unbiased variances of n rows and of repeated ones differ by up to 1/n."""
    return min(20 * torch.finfo(dtype).eps, 0.02)
