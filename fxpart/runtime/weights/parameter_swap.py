"""Parameters that hold other data for a while; the objects stay, and so do their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def swap_parameter_data(
    parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor] | None
) -> Iterator[None]:
    """``parameters[i].data`` are ``tensors[i]`` within; None: everything stays. Nothing is copied.

    A tensor that is laid out otherwise than its parameter is laid out anew, for what autograd saved
    is found again by its place.
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
    """The tensor with the parameter's strides: itself where it has them."""
    tensor = tensor.detach()
    if tensor.stride() == parameter.stride():
        return tensor
    found = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return found.copy_(tensor)
