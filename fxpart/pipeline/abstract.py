"""Running a graph on fake tensors, node by node, with gradients on: aliases and gradients as they will be."""

from __future__ import annotations

from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from fxpart.pipeline.edit import value


def leaf(node: fx.Node, root: torch.nn.Module, mode: AbstractContextManager[Any]) -> Any:
    """A fake stand-in for an input or for state, with storage of its own; numbers as they are.

    A parameter that is trained requires a gradient.
    """
    known = value(node)
    if not isinstance(known, torch.Tensor):
        return known
    grad = node.op == "get_attr" and wants_gradient(node, root)
    return stand_in(known, grad, mode)


def wants_gradient(node: fx.Node, root: torch.nn.Module) -> bool:
    """Whether a get_attr node fetches a parameter that is trained."""
    return bool(getattr(attrgetter(str(node.target))(root), "requires_grad", False))


def stand_in(known: torch.Tensor, grad: bool, mode: AbstractContextManager[Any]) -> torch.Tensor:
    """A fresh fake tensor of the same shape, strides, dtype and device."""
    with mode, torch.no_grad():
        made = torch.empty_strided(
            known.size(), known.stride(), dtype=known.dtype, device=known.device
        )
    return made.requires_grad_(grad)


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The tensor's storage; torch keeps one Python object for it while anybody holds it."""
    return tensor.untyped_storage()


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of an op's result, through lists and tuples."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in tensors(item)]
    return []
