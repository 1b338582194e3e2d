"""Sparse gradients as backwards leave them: taken from their parameters at once, and kept apart."""

from __future__ import annotations

import torch

from fxpart.runtime.embedding_tables.sparse_gradient_parts import SparseGradientParts


class SparseGradientCapture:
    """What backwards have given to the parameters that are watched, until it is dropped."""

    def __init__(self) -> None:
        """Nothing is watched."""
        self._given: dict[int, list[torch.Tensor]] = {}

    def watch(self, parameter: torch.Tensor) -> None:
        """Take what each backward gives to a parameter; once is enough."""
        if id(parameter) not in self._given:
            self._given[id(parameter)] = []
            parameter.register_post_accumulate_grad_hook(self._take)

    def pending(self, parameter: torch.Tensor) -> SparseGradientParts | None:
        """What was taken from a parameter; None where nothing was."""
        given = self._given.get(id(parameter))
        return SparseGradientParts.of(given) if given else None

    def drop(self, parameter: torch.Tensor) -> None:
        """Forget what was taken from a parameter."""
        self._given.get(id(parameter), []).clear()

    def reset(self) -> None:
        """Forget what was taken from all."""
        for given in self._given.values():
            given.clear()

    def _take(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._given[id(parameter)].append(parameter.grad)
            parameter.grad = None
