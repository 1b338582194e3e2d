"""A sparse gradient as what each backward added to it, and such parts in the order of one process.

Torch adds sparse gradients by merging their rows: the result depends on how they came, part by
part, and so do the bits of what an optimizer sums. So the parts are kept, those of one microbatch
are put together in the order of one process, and then added as torch's autograd adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SparseGradientParts:
    """Rows of a sparse gradient. lengths: how many each backward added, in order.

    ids: [n] int64. values: [n, ...], as the table's rows.
    """

    lengths: tuple[int, ...]
    ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, gradients: Sequence[torch.Tensor]) -> SparseGradientParts:
        """Of what each backward gave, at least one."""
        # of a compiled stage it may be plain: what is not zero of it
        rows = [g if g.is_sparse else g.to_sparse(1) for g in gradients]
        return cls(
            tuple(g._nnz() for g in rows),
            torch.cat([g._indices()[0] for g in rows]),
            torch.cat([g._values() for g in rows]),
        )

    def copy(self) -> SparseGradientParts:
        """The same in memory of its own."""
        return SparseGradientParts(self.lengths, self.ids.clone(), self.values.clone())

    def gradient(self, like: torch.Tensor) -> torch.Tensor:
        """The sparse gradient of the parameter ``like``, added up as autograd does it."""
        total: torch.Tensor | None = None
        with torch.no_grad():
            for ids, values in zip(
                self.ids.split(self.lengths), self.values.split(self.lengths), strict=True
            ):
                part = torch.sparse_coo_tensor(
                    ids.unsqueeze(0), values, like.shape, check_invariants=False
                )
                total = part if total is None else total.add_(part)
        assert total is not None, "there is a part"
        return total


def merge_parts(parts: Iterable[tuple[Iterable[int], SparseGradientParts]]) -> SparseGradientParts:
    """All of them, by the numbers that are given with each (ascending), in order within a number.

    numbers: of each of a Parts' lengths, such as its microbatch. Lengths of one number are added.
    """
    pieces: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
    for order, (numbers, part) in enumerate(parts):
        ids, values = part.ids.split(part.lengths), part.values.split(part.lengths)
        pieces += [
            (number, order, *both) for number, *both in zip(numbers, ids, values, strict=True)
        ]
    pieces.sort(key=lambda piece: piece[:2])
    lengths: dict[int, int] = {}
    for number, _, ids, _ in pieces:
        lengths[number] = lengths.get(number, 0) + len(ids)
    return SparseGradientParts(
        tuple(lengths.values()),
        torch.cat([ids for _, _, ids, _ in pieces]),
        torch.cat([values for *_, values in pieces]),
    )
