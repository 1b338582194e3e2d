"""Batch norm with sharded rows: statistics of the whole batch, equal on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.factor_shares import Axes, spans


def batch_norm_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """Run ``aten.batch_norm`` on this rank's rows with global statistics; update running ones.

    In evaluation it is the plain op. x: [rows, channels, positions...].
    """
    if not training:
        found: torch.Tensor = torch.ops.aten.batch_norm.default(
            x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
        )
        return found
    places: Size = 1
    for length in x.shape[2:]:
        places = places * length
    counts = [length * places for _, length in spans(mesh, axes, size)]
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.no_grad():
        mean, square = _statistics(mesh, axes, x.to(wide), counts)
        total = size * places
        _follow(running_mean, mean, momentum)
        _follow(running_var, square / (total - 1), momentum)
        inverse = (square / total + eps).rsqrt()
    result: torch.Tensor = _BatchNormFunction.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, mean, inverse, (mesh, axes, total)
    )
    return result


def _statistics(
    mesh: Communicator, axes: Axes, x: torch.Tensor, counts: list[Size]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and sum of squared deviations per channel, over all ranks.

    The ranks' values are combined by the formula of Chan, Golub and LeVeque (1979): one all-gather,
    and no cancellation.
    """
    own = counts[mesh.place(axes)]
    dims = [0, *range(2, x.dim())]
    mean = x.sum(dims) / own if own != 0 else x.new_zeros(x.shape[1])
    square = (x - _wide(mean, x)).square().sum(dims)
    pieces = mesh.all_gather(torch.stack([mean, square]), axes)
    total: Size = sum(counts)
    whole = sum(piece[0] * (n / total) for piece, n in zip(pieces, counts, strict=True))
    assert isinstance(whole, torch.Tensor)
    squares = sum(
        piece[1] + (piece[0] - whole).square() * n for piece, n in zip(pieces, counts, strict=True)
    )
    assert isinstance(squares, torch.Tensor)
    return whole, squares


def _follow(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    """Update a running statistic."""
    if running is not None:
        running.copy_(value * momentum + running * (1 - momentum))


def _wide(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return per-channel values in a shape that broadcasts over rows and positions."""
    return channels.view([-1 if d == 1 else 1 for d in range(x.dim())])


class _BatchNormFunction(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias; backward reduces two values per channel over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        how: tuple[Communicator, Axes, Size],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.how = how
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        return (x * _wide(scale, x) + _wide(shift, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        mesh, axes, total = ctx.how
        dims = [0, *range(2, x.dim())]
        normal = (x - _wide(mean, x)) * _wide(inverse, x)
        sums = torch.stack([grad.to(normal.dtype).sum(dims), (grad * normal).sum(dims)])
        grad_x = None
        if ctx.needs_input_grad[0]:
            whole = mesh.all_reduce(sums, axes) / total
            scale = inverse if weight is None else inverse * weight
            inner = grad - _wide(whole[0], x) - normal * _wide(whole[1], x)
            grad_x = (inner * _wide(scale, x)).to(x.dtype)
        grad_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sums[0].to(bias.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None
