"""Temporary replacement of parameter data; parameter objects and gradients are unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


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
