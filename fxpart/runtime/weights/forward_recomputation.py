"""Forwards that run again in a backward: with the weights that they read the first time.

A recomputed activation has to be what it was. Where a backward reads other weights than its forward
did, the parameters hold the forward's while it runs again, and what autograd would have saved of
it is kept as :class:`~fxpart.runtime.weights.saved_tensor_hooks.SavedWeightHooks` keeps it: the
backward finds its own weights and the forward's activations, as without recomputation.
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
    """Of one stage; its :class:`~fxpart.runtime.executor.recompute.StageRecomputation` asks it."""

    def __init__(self, saved: SavedWeightHooks, parameters: Sequence[torch.Tensor]) -> None:
        """parameters: that hold other weights in a forward than in its backward."""
        self._saved = saved
        self._parameters = parameters
        self._microbatch = -1
        self._tensors: Tensors | None = None

    @contextmanager
    def during(self, microbatch: int, tensors: Tensors | None) -> Iterator[None]:
        """Around a backward. tensors: what its forward read; None: the same as the backward."""
        self._microbatch, self._tensors = microbatch, tensors
        try:
            yield
        finally:
            self._microbatch, self._tensors = -1, None

    @contextmanager
    def forward_weights(self) -> Iterator[Callable[[torch.Tensor], Any] | None]:
        """Around a forward that runs again: what packs the tensors that it saves.

        None where they may be kept as they are.
        """
        if self._tensors is None:
            yield None
            return
        with swap_parameter_data(self._parameters, self._tensors):
            yield self._saved.packing()

    def unpack(self, packed: Any) -> torch.Tensor:
        """A saved tensor as the backward that runs reads it."""
        return self._saved.unpack(packed, self._microbatch)
