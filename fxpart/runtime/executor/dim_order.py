"""The order of dims in memory of what crosses stages: it decides in which order kernels add up.

A tensor travels as a contiguous one: its dims are permuted to their order in memory, and permuted
back where it arrives. The order of a link is sent once, before its first tensor; a tensor that has
another order later is copied to that of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]


def get_dim_order(tensor: torch.Tensor) -> Order:
    """The dims from the outermost to the innermost in memory; as they are where contiguous."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def is_contiguous_order(order: Order) -> bool:
    """Whether the order is that of a contiguous tensor."""
    return order == tuple(range(len(order)))


def pack_to_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """A contiguous tensor of the same shape whose memory has the dims in the order.

    A view where the tensor lies so. Its own dims mean nothing: :func:`unpack_from_order` restores
    them.
    """
    if is_contiguous_order(order):
        return tensor.contiguous()
    return tensor.permute(order).contiguous().view(tensor.shape)


def unpack_from_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """The inverse of :func:`pack_to_order`: a view."""
    if is_contiguous_order(order):
        return tensor
    shape = tensor.shape
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.reshape([shape[dim] for dim in order]).permute(inverse)


def has_several_orders(shape: Sequence[object]) -> bool:
    """Whether tensors of these dims can lie in more than one order."""
    return len(shape) > 1
