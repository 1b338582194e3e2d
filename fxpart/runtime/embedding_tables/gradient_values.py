"""The numbers of a gradient, whether it is sparse or not."""

from __future__ import annotations

import torch


def get_gradient_values(parameter: torch.Tensor) -> torch.Tensor | None:
    """A view of the numbers of a parameter's gradient, None without one; to be changed in place.

    A sparse gradient is coalesced for it: what came for one row in several parts is added up in the
    order in which it came, as every optimizer does it. Rows without numbers are zeros.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return gradient
    if not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()
