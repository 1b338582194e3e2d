"""Memory order of the dims of transferred tensors, which affects the summation order of kernels.

A tensor is sent as a contiguous tensor: its dims are permuted to their memory order, and permuted
back by the receiver. The order of a link is sent once, before its first tensor; a later tensor with
another order is copied to that of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]


def get_dim_order(tensor: torch.Tensor) -> Order:
    """Return the dims from outermost to innermost in memory."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def is_contiguous_order(order: Order) -> bool:
    """Return whether the order is that of a contiguous tensor."""
    return order == tuple(range(len(order)))


def pack_to_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Return a contiguous tensor of the same shape with the dims laid out in the order.

    It is a view if the tensor has that layout. Its dims are not meaningful until
    :func:`unpack_from_order` restores them.
    """
    if is_contiguous_order(order):
        return tensor.contiguous()
    return tensor.permute(order).contiguous().view(tensor.shape)


def unpack_from_order(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Return the inverse of :func:`pack_to_order`, a view."""
    if is_contiguous_order(order):
        return tensor
    shape = tensor.shape
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.reshape([shape[dim] for dim in order]).permute(inverse)


def has_several_orders(shape: Sequence[object]) -> bool:
    """Return whether tensors of these dims can have more than one memory order."""
    return len(shape) > 1
