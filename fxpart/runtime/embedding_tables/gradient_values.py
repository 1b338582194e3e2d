"""Elements of a dense or sparse gradient."""

from __future__ import annotations

import torch


def get_gradient_values(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the elements of a parameter's gradient, to be changed in place; None without
    one.

    A sparse gradient is coalesced first: duplicate rows are summed in their order, as every
    optimizer does it.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return gradient
    if not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()
