"""A sparse gradient as what each backward added to it, and such parts in the order of one process.

Torch adds sparse gradients by putting their rows one behind the other, and sums what came for one
row in that order when an optimizer asks for it. So where rows of several ranks stand in the order
of one process, microbatch by microbatch, the sums have the bits of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Parts:
    """Rows of a sparse gradient. lengths: how many each backward added, in order.

    ids: [n] int64. values: [n, ...], as the table's rows.
    """

    lengths: tuple[int, ...]
    ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, gradient: torch.Tensor, ends: Sequence[int]) -> Parts:
        """ends: how many rows there were after each backward."""
        if not gradient.is_sparse:  # a compiled stage has made it so: what is not zero of it
            gradient = gradient.to_sparse(1)
        ids, values = gradient._indices()[0], gradient._values()
        rising = all(a <= b for a, b in pairwise((0, *ends)))
        if not ends or ends[-1] != len(ids) or not rising:  # coalesced meanwhile: one part
            ends = (len(ids),)
        return cls(tuple(b - a for a, b in pairwise((0, *ends))), ids, values)

    def copy(self) -> Parts:
        """The same in memory of its own."""
        return Parts(self.lengths, self.ids.clone(), self.values.clone())

    def gradient(self, like: torch.Tensor) -> torch.Tensor:
        """The sparse gradient of the parameter ``like``."""
        return torch.sparse_coo_tensor(
            self.ids.unsqueeze(0), self.values, like.shape, check_invariants=False
        )


def merged(parts: Iterable[tuple[Iterable[int], Parts]]) -> Parts:
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
    return Parts(
        tuple(lengths.values()),
        torch.cat([ids for _, _, ids, _ in pieces]),
        torch.cat([values for *_, values in pieces]),
    )
