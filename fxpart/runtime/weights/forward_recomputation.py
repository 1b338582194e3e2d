"""Recomputation of a forward in its backward, with the weights of the original forward.

Recomputed activations must equal the original ones. If a backward reads other weights than its
forward did, the parameters contain the forward's weights during recomputation. Tensors that
autograd saves there are packed by
:class:`~fxpart.runtime.weights.saved_tensor_hooks.SavedWeightHooks`, so the backward reads its own
weights and the forward's activations, as without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fxpart.runtime.weights.parameter_swap import swap_parameter_data
from fxpart.runtime.weights.saved_tensor_hooks import SavedWeightHooks
from fxpart.runtime.weights.weight_stash import Tensors


class ForwardRecomputation:
    """Recomputation in one stage, used by
    :class:`~fxpart.runtime.executor.recompute.StageRecomputation`.
    """

    def __init__(self, saved: SavedWeightHooks, parameters: Sequence[torch.Tensor]) -> None:
        """Create the context. parameters: have other weights in a forward than in its backward."""
        self._saved = saved
        self._parameters = parameters
        self._microbatch = -1
        self._tensors: Tensors | None = None

    @contextmanager
    def during(self, microbatch: int, tensors: Tensors | None) -> Iterator[None]:
        """Enter for a backward. tensors: weights of its forward, or None if equal."""
        self._microbatch, self._tensors = microbatch, tensors
        try:
            yield
        finally:
            self._microbatch, self._tensors = -1, None

    @contextmanager
    def forward_weights(self) -> Iterator[Callable[[torch.Tensor], Any] | None]:
        """Enter for a recomputed forward; yield the function that packs saved tensors, or None."""
        if self._tensors is None:
            yield None
            return
        with swap_parameter_data(self._parameters, self._tensors):
            yield self._saved.packing()

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a saved tensor as the current backward reads it."""
        return self._saved.unpack(packed, self._microbatch)
