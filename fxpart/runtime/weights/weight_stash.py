"""The copies of a stage's weights that something will still read, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

Tensors = list[torch.Tensor]


class WeightSource(NamedTuple):
    """Which weights: a version (updates since the start), and how far they look ahead of it.

    Weights of equal sources are equal. look: 0 is the version itself; negative: corrected by so
    many updates (PipeMare).
    """

    version: int
    look: int = 0


class WeightStash:
    """Copies by source. most: as many as there ever were at once, beside the weights themselves."""

    def __init__(self) -> None:
        """Nothing is held."""
        self._copies: dict[WeightSource, Tensors] = {}
        self.most = 0

    def get(self, source: WeightSource) -> Tensors | None:
        """The copy; None where there is none."""
        return self._copies.get(source)

    def put(self, source: WeightSource, tensors: Tensors) -> Tensors:
        """Hold a copy."""
        self._copies[source] = tensors
        self.most = max(self.most, len(self._copies))
        return tensors

    def drop(self, source: WeightSource) -> None:
        """Hold it no longer."""
        del self._copies[source]

    def sources(self) -> tuple[WeightSource, ...]:
        """Of all copies."""
        return tuple(self._copies)

    def tensors(self) -> Iterable[torch.Tensor]:
        """All that is held."""
        for copy in self._copies.values():
            yield from copy

    def __len__(self) -> int:
        return len(self._copies)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    sizes = {s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).data_ptr()}
    return sum(sizes.values())
