"""Capture of sparse gradients per backward, before they accumulate in their parameters."""

from __future__ import annotations

import torch

from fxpart.runtime.embedding_tables.sparse_gradient_parts import SparseGradientParts


class SparseGradientCapture:
    """Gradients that backwards have produced for watched parameters."""

    def __init__(self) -> None:
        """Create a capture without parameters."""
        self._captured: dict[int, list[torch.Tensor]] = {}

    def watch(self, parameter: torch.Tensor) -> None:
        """Capture the gradients of a parameter from now on."""
        if id(parameter) not in self._captured:
            self._captured[id(parameter)] = []
            parameter.register_post_accumulate_grad_hook(self._capture)

    def pending(self, parameter: torch.Tensor) -> SparseGradientParts | None:
        """Return the captured gradients of a parameter, or None."""
        captured = self._captured.get(id(parameter))
        return SparseGradientParts.of(captured) if captured else None

    def drop(self, parameter: torch.Tensor) -> None:
        """Drop the captured gradients of a parameter."""
        self._captured.get(id(parameter), []).clear()

    def reset(self) -> None:
        """Drop all captured gradients."""
        for captured in self._captured.values():
            captured.clear()

    def _capture(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._captured[id(parameter)].append(parameter.grad)
            parameter.grad = None
