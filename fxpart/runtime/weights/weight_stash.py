"""Copies of a stage's weights that a later computation reads, and their use as parameter data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

Tensors = list[torch.Tensor]


class WeightSource(NamedTuple):
    """Identity of weights: a version (updates since the start) and a prediction horizon.

    Equal sources are equal weights. look: updates ahead; 0: the version itself; negative: corrected
    by so many updates (PipeMare).
    """

    version: int
    look: int = 0


class WeightStash:
    """Copies by source. most: largest number of copies at once, without the weights themselves."""

    def __init__(self) -> None:
        """Create an empty stash."""
        self._copies: dict[WeightSource, Tensors] = {}
        self.most = 0

    def get(self, source: WeightSource) -> Tensors | None:
        """Return the copy of a source, or None."""
        return self._copies.get(source)

    def put(self, source: WeightSource, tensors: Tensors) -> Tensors:
        """Store a copy."""
        self._copies[source] = tensors
        self.most = max(self.most, len(self._copies))
        return tensors

    def drop(self, source: WeightSource) -> None:
        """Delete a copy."""
        del self._copies[source]

    def sources(self) -> tuple[WeightSource, ...]:
        """Return the sources of all copies."""
        return tuple(self._copies)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield all tensors."""
        for copy in self._copies.values():
            yield from copy

    def __len__(self) -> int:
        return len(self._copies)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each storage counted once."""
    sizes = {s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage()).data_ptr()}
    return sum(sizes.values())


@contextmanager
def swap_parameter_data(
    parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor] | None
) -> Iterator[None]:
    """Set ``parameters[i].data`` to ``tensors[i]`` within the context; None: no change.

    Nothing is copied, except tensors with other strides than their parameter, because views that
    autograd saved are located by strides.
    """
    if tensors is None:
        yield
        return
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data = laid_out(parameter, tensor)
        yield
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data


def laid_out(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the parameter's strides, itself if it has them."""
    tensor = tensor.detach()
    if tensor.stride() == parameter.stride():
        return tensor
    found = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return found.copy_(tensor)
