"""Gather sharded parameters again in backward instead of saving them.

ZeRO-3 (Rajbhandari et al., SC 2020) shards the parameters: each is gathered before use and dropped
afterwards. In a graph this is an all-gather of a parameter, whose result autograd would save until
backward; the hooks below save only how to gather it again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxpart.collectives import redistribution
from fxpart.collectives.differentiable_ops import _AllGather
from fxpart.collectives.gather_prefetch import BackwardGathers, Finish, RegatheredTensor
from fxpart.compat import own_backward, saved_hooks, view_base

Start = Callable[[], Finish]


class ParameterRegather:
    """Saved-tensor hooks for the forward of a stage.

    A gathered parameter, a view of one, or one cast to another dtype is dropped and gathered again
    in backward, whose order is equal on all ranks because their graphs are. dropped, bytes: number
    and size of dropped tensors, counted per op that would have saved them.
    """

    def __init__(self) -> None:
        """Start with zero counts."""
        self.dropped = 0
        self.bytes = 0

    def hooks(
        self, gathers: BackwardGathers | None = None, block: Callable[[], int] = int
    ) -> AbstractContextManager[Any]:
        """Return the context in which forward saves no gathered parameter.

        All other tensors use the surrounding hooks, if any. gathers: those of the backward, by
        default each starts where it is needed. block: returns the current block of the forward.
        """
        keep, bring = saved_hooks() or (_same, _same)
        again = BackwardGathers(0) if gathers is None else gathers

        def pack(tensor: torch.Tensor) -> RegatheredTensor | Any:
            start = recipe(tensor)
            if start is None:
                return keep(tensor)
            self.dropped += 1
            self.bytes += tensor.nbytes
            return again.add(start, block())

        def unpack(kept: RegatheredTensor | Any) -> torch.Tensor:
            return kept.make() if isinstance(kept, RegatheredTensor) else bring(kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def recipe(tensor: torch.Tensor) -> Start | None:
    """Return what starts gathering a parameter, its cast or its view; None for other tensors."""
    if tensor.grad_fn is None:
        return None
    found = _made_by(tensor.grad_fn, tensor)
    if found is not None:
        return found
    base = view_base(tensor)
    if base is tensor or base.dtype != tensor.dtype or not base.is_contiguous():
        return None
    # A gathered tensor may itself be a view of the receive buffer; its own node is then the end of
    # the view chain.
    node = base.grad_fn if base.grad_fn is not None else _end_of_views(tensor.grad_fn)
    whole = None if node is None else _made_by(node, base)
    if whole is None:
        return None
    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
    return _then(whole, lambda found: found.as_strided(*layout))


def _then(start: Start, change: Callable[[torch.Tensor], torch.Tensor]) -> Start:
    """Return what starts the same, and changes the result."""

    def begin() -> Finish:
        finish = start()
        return lambda: change(finish())

    return begin


def _end_of_views(function: Any) -> Any:
    """Return the first node that is not a torch op, starting at a view."""
    while function is not None and own_backward(function) is None:
        before = function.next_functions
        function = before[0][0] if len(before) == 1 else None
    return function


def _made_by(function: Any, like: torch.Tensor) -> Start | None:
    """Return what starts recreating a node's result if it only gathers a parameter."""
    if function.name() == "ToCopyBackward0":
        dtype, device = like.dtype, like.device
        inner = _gathered(function.next_functions[0][0])
        return None if inner is None else _then(inner, lambda x: x.to(device=device, dtype=dtype))
    return _gathered(function)


def _gathered(function: Any) -> Start | None:
    if own_backward(function) is not _AllGather:
        return None
    mesh, axis, dim, outer = function.how
    size = function.whole
    before = function.next_functions[0][0]
    parameter = getattr(before, "variable", None)
    if parameter is not None:
        return lambda: redistribution.start_gather(mesh, parameter.detach(), axis, dim, size, outer)
    inner = _gathered(before)
    if inner is None:
        return None
    return _then(inner, lambda x: redistribution.gather(mesh, x, axis, dim, size, outer))
