"""Differentiable changes of placement along one axis: the collective ops of a local graph.

The communicator is not part of a node's arguments; the caller passes it first. ``R``, ``S`` and
``P`` are the placements along the axis. ``gradient`` is the placement of the RESULT's gradient:
"R", replicated, or "P", partial. Tensors without a gradient are handled alike. On an axis of size 1
every op is the identity. No op may be differentiated twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fxpart.collectives import redistribution
from fxpart.collectives.communicator import Communicator, Size
from fxpart.compat import is_watched


def _tracked(x: torch.Tensor) -> bool:
    """Return whether autograd records this call."""
    return x.requires_grad and torch.is_grad_enabled()


def slice_shard(
    mesh: Communicator, x: torch.Tensor, axis: str, dim: int, outer: int = 1, gradient: str = "R"
) -> torch.Tensor:
    """R -> S(dim, outer): this rank's shard. Backward: an all-gather, or ("P") zero padding."""
    if mesh.size(axis) == 1:
        return x
    if not _tracked(x):
        return redistribution.cut(mesh, x, axis, dim, outer)
    found: torch.Tensor = _SliceShard.apply(x, mesh, axis, dim, outer, gradient)  # type: ignore[no-untyped-call]
    return found


def all_gather(
    mesh: Communicator,
    x: torch.Tensor,
    axis: str,
    dim: int,
    size: Size,
    outer: int = 1,
    gradient: str = "R",
) -> torch.Tensor:
    """S(dim, outer) -> R; size: of the whole dim. Backward: a slice, or ("P") a reduce-scatter."""
    if mesh.size(axis) == 1:
        return x
    if not _tracked(x):
        return _gather(mesh, x, axis, dim, size, outer)
    found: torch.Tensor = _AllGather.apply(x, mesh, axis, dim, size, outer, gradient)  # type: ignore[no-untyped-call]
    return found


def _gather(
    mesh: Communicator, x: torch.Tensor, axis: str, dim: int, size: Size, outer: int
) -> torch.Tensor:
    """Gather a tensor, whose gather has started if it is a parameter of the stage."""
    found = None if mesh.ahead is None else mesh.ahead.take(x, axis, dim, outer)
    return redistribution.gather(mesh, x, axis, dim, size, outer) if found is None else found


def all_reduce(mesh: Communicator, x: torch.Tensor, axis: str, gradient: str = "R") -> torch.Tensor:
    """P -> R: the sum. Backward: the identity, or ("P") an all-reduce."""
    if mesh.size(axis) == 1:
        return x
    if not _tracked(x):
        return mesh.all_reduce(x, axis)
    found: torch.Tensor = _AllReduce.apply(x, mesh, axis, gradient)  # type: ignore[no-untyped-call]
    return found


def reduce_scatter(
    mesh: Communicator, x: torch.Tensor, axis: str, dim: int, outer: int = 1
) -> torch.Tensor:
    """P -> S(dim, outer): this rank's shard of the sum. Backward: an all-gather."""
    if mesh.size(axis) == 1:
        return x
    if not _tracked(x):
        return redistribution.scatter(mesh, x, axis, dim, outer)
    found: torch.Tensor = _ReduceScatter.apply(x, mesh, axis, dim, outer)  # type: ignore[no-untyped-call]
    return found


def all_to_all(
    mesh: Communicator,
    x: torch.Tensor,
    axis: str,
    source: int,
    target: int,
    size: Size,
    source_outer: int = 1,
    target_outer: int = 1,
) -> torch.Tensor:
    """S(source) -> S(target); size: of the whole source dim. Backward: the reverse."""
    if mesh.size(axis) == 1:
        return x
    way = (source, source_outer, target, target_outer)
    if not _tracked(x):
        return redistribution.turn(mesh, x, axis, way, size)
    found: torch.Tensor = _AllToAll.apply(x, mesh, axis, way, size)  # type: ignore[no-untyped-call]
    return found


def enter(mesh: Communicator, x: torch.Tensor, axis: str) -> torch.Tensor:
    """R -> R, for users with a partial gradient: identity. Backward: an all-reduce."""
    if mesh.size(axis) == 1 or not _tracked(x):
        return x
    found: torch.Tensor = _EnterFunction.apply(x, mesh, axis)  # type: ignore[no-untyped-call]
    return found


def leave(mesh: Communicator, x: torch.Tensor, axis: str) -> torch.Tensor:
    """R -> R, for a value with a partial gradient: identity.

    Backward: the axis's first rank keeps the gradient, the others return zeros.
    """
    if mesh.size(axis) == 1 or not _tracked(x):
        return x
    found: torch.Tensor = _LeaveFunction.apply(x, mesh, axis)  # type: ignore[no-untyped-call]
    return found


def first_only(mesh: Communicator, x: torch.Tensor, axis: str) -> torch.Tensor:
    """R -> P: the first rank of the axis keeps its values, the others have zeros.

    Backward: identity.
    """
    if mesh.size(axis) == 1:
        return x
    if not _tracked(x):
        return redistribution.first(mesh, x, axis)
    found: torch.Tensor = _FirstRankOnly.apply(x, mesh, axis)  # type: ignore[no-untyped-call]
    return found


class _SliceShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mesh: Communicator,
        axis: str,
        dim: int,
        outer: int,
        gradient: str,
    ) -> torch.Tensor:
        ctx.how = mesh, axis, dim, x.shape[dim], outer
        ctx.partial = gradient == "P"
        return redistribution.cut(mesh, x, axis, dim, outer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = redistribution.around if ctx.partial else redistribution.gather
        mesh, axis, dim, size, outer = ctx.how
        return back(mesh, grad, axis, dim, size, outer), None, None, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mesh: Communicator,
        axis: str,
        dim: int,
        size: Size,
        outer: int,
        gradient: str,
    ) -> torch.Tensor:
        ctx.how = mesh, axis, dim, outer
        ctx.whole = size  # for fxpart.collectives.parameter_regather
        ctx.parameter = x if x.is_leaf else None
        ctx.partial = gradient == "P"
        return _gather(mesh, x, axis, dim, size, outer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = redistribution.scatter if ctx.partial else redistribution.cut
        mesh, axis, dim, outer = ctx.how
        grad = grad.to_dense() if grad.is_sparse else grad  # of a gathered table
        late, parameter = mesh.scatters, ctx.parameter
        if ctx.partial and late is not None and parameter is not None and not is_watched(parameter):
            late.add(parameter, redistribution.start_scatter(mesh, grad, axis, dim, outer))
            return None, None, None, None, None, None, None
        return back(mesh, grad, axis, dim, outer), None, None, None, None, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: Communicator, axis: str, gradient: str
    ) -> torch.Tensor:
        ctx.how = mesh, axis
        ctx.partial = gradient == "P"
        return mesh.all_reduce(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mesh, axis = ctx.how
        return mesh.all_reduce(grad, axis) if ctx.partial else grad, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: Communicator, axis: str, dim: int, outer: int
    ) -> torch.Tensor:
        ctx.how = mesh, axis, dim, x.shape[dim], outer
        return redistribution.scatter(mesh, x, axis, dim, outer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mesh, axis, dim, size, outer = ctx.how
        return redistribution.gather(mesh, grad, axis, dim, size, outer), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mesh: Communicator,
        axis: str,
        way: tuple[int, int, int, int],
        size: Size,
    ) -> torch.Tensor:
        ctx.how = mesh, axis, (*way[2:], *way[:2]), x.shape[way[2]]
        if way[0] == way[2]:
            ctx.how = *ctx.how[:3], size
        return redistribution.turn(mesh, x, axis, way, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mesh, axis, way, size = ctx.how
        return redistribution.turn(mesh, grad, axis, way, size), None, None, None, None


class _EnterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Communicator, axis: str) -> torch.Tensor:
        ctx.how = mesh, axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mesh, axis = ctx.how
        return mesh.all_reduce(grad, axis), None, None


class _LeaveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Communicator, axis: str) -> torch.Tensor:
        ctx.how = mesh, axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mesh, axis = ctx.how
        return redistribution.first(mesh, grad, axis), None, None


class _FirstRankOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Communicator, axis: str) -> torch.Tensor:
        return redistribution.first(mesh, x, axis).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None
