"""Cross-entropy with sharded rows or classes.

Rows: the mean is over the counted targets of all ranks, so their number (or the weight of their
classes) is reduced first. Classes: the vocabulary-parallel cross-entropy of Megatron-LM (Shoeybi et
al., 2019, section 3), which sends a maximum and a sum per row, but no logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fxpart.collectives.communicator import Axis, CollectiveHandle, Communicator, Size
from fxpart.collectives.factor_shares import MEAN, SUM, Axes, make_unsupported_form_error, span

_ATEN = torch.ops.aten


def cross_entropy_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return this rank's part of the mean of ``aten.cross_entropy_loss`` over rows (Partial)."""
    op = _ATEN.cross_entropy_loss.default
    if reduction != MEAN:
        found: torch.Tensor = op(logits, target, weight, reduction, ignore_index, label_smoothing)
        return found
    total: torch.Tensor
    if target.is_floating_point():  # class probabilities: every row counts
        total = op(logits, target, weight, SUM, ignore_index, label_smoothing)
        rows: Size = size
        for length in logits.shape[2:]:
            rows = rows * length
        return total / rows
    counted = _start_count(mesh, axes, target, weight, ignore_index, logits.dtype)
    total = op(logits, target, weight, SUM, ignore_index, label_smoothing)
    return total / counted.wait()


def nll_loss_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return this rank's part of the mean of ``aten.nll_loss`` (also _nd, 2d) (Partial)."""
    op = _ATEN.nll_loss_nd.default
    if reduction != MEAN:
        found: torch.Tensor = op(x, target, weight, reduction, ignore_index)
        return found
    counted = _start_count(mesh, axes, target, weight, ignore_index, x.dtype)
    total: torch.Tensor = op(x, target, weight, SUM, ignore_index)
    return total / counted.wait()


def cross_entropy_classes(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return ``aten.cross_entropy_loss`` with sharded classes and ``weight`` (Replicate).

    logits: [classes], or [rows, classes, positions...]. Raise FXP108 for class probabilities as
    targets.
    """
    return _parallel(
        mesh, ((), axes), size, logits, target, weight, reduction, ignore_index, label_smoothing
    )


def cross_entropy_rows_classes(
    mesh: Communicator,
    axes: tuple[Axes, Axes],
    size: tuple[Size, Size],
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss with rows and classes sharded on different axes.

    The result is Partial along the rows' axes and Replicate along the others. axes, size: of the
    rows, of the classes.
    """
    return _parallel(
        mesh, axes, size[1], logits, target, weight, reduction, ignore_index, label_smoothing
    )


def _parallel(
    mesh: Communicator,
    axes: tuple[Axes, Axes],
    size: Size,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """axes: of the rows, of the classes; size: of the classes."""
    if target.is_floating_point():
        raise make_unsupported_form_error(
            "cross_entropy_classes", "the targets are probabilities of classes"
        )
    start, classes = span(mesh, axes[1], size)
    dim = 1 if logits.dim() > 1 else 0
    local = target - start  # type: ignore[operator]
    outside = (local < 0) | (local >= classes) | (target == ignore_index)
    local = local.masked_fill(outside, 0)
    how = mesh, axes[1], dim, bool(smoothing), size
    nll, smooth, own = _CrossEntropyTerms.apply(logits, local, outside, weight, how)  # type: ignore[no-untyped-call]
    ignored = target == ignore_index
    loss = nll * (1 - smoothing) + smooth * (smoothing / size) if smoothing else nll
    loss = loss.masked_fill(ignored, 0)
    if reduction == MEAN:
        counts = own.masked_fill(ignored, 0).sum()
        if axes[0]:
            counts = mesh.all_reduce(counts, axes[0])
        loss = loss.sum() / counts
    elif reduction == SUM:
        loss = loss.sum()
    found: torch.Tensor = loss.to(logits.dtype)
    return found


class _CrossEntropyTerms(torch.autograd.Function):
    """Per row: weighted -log p of the target, its sum over classes, and the target's weight.

    Two all-reduces: the largest logit, then all sums at once. Saves the rank's probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local: torch.Tensor,
        outside: torch.Tensor,
        weight: torch.Tensor | None,
        how: tuple[Communicator, Axis, int, bool, Size],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mesh, axes, dim, smoothing, size = how
        wide = logits.dtype in (torch.float16, torch.bfloat16)
        x = logits.float() if wide else logits
        shape = x.shape[:dim] + x.shape[dim + 1 :]
        empty = x.shape[dim] == 0
        largest = x.new_full(shape, -torch.inf) if empty else x.amax(dim)
        largest = mesh.all_reduce(largest, axes, "max")
        x = x - largest.unsqueeze(dim)
        nothing = x.new_zeros(shape)
        at = nothing if empty else x.gather(dim, local.unsqueeze(dim)).squeeze(dim)
        if weight is None:
            own = (~outside).to(x.dtype)
        else:
            weight = weight.to(x.dtype)
            own = nothing if empty else weight[local].masked_fill(outside, 0)
        rows = [nothing, at.masked_fill(outside, 0), own]
        if smoothing:
            scaled = x if weight is None else x * _along(weight, dim, x.dim())
            rows += [scaled.sum(dim)]
            rows += [] if weight is None else [weight.sum().expand(shape)]
        rows[0] = x.exp_().sum(dim)
        sums = mesh.all_reduce(torch.stack(rows), axes)
        log = sums[0].log()
        own = sums[2]
        total = size if weight is None else sums[-1]
        smooth = log * total - sums[3] if smoothing else nothing  # type: ignore[operator]
        x /= sums[0].unsqueeze(dim)
        ctx.save_for_backward(
            x, local, outside, own, *(() if weight is None else (weight, sums[-1]))
        )
        ctx.how = dim, smoothing, size, logits.dtype
        ctx.mark_non_differentiable(own)
        return (log - sums[1]) * own, smooth, own

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, nll: torch.Tensor, smooth: torch.Tensor, own: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        chances, local, outside, own, *weights = ctx.saved_tensors
        dim, smoothing, size, dtype = ctx.how
        nll = nll * own
        rows = nll
        if smoothing:
            rows = rows + smooth * (weights[1] if weights else size)
        grad = chances * rows.unsqueeze(dim)
        if smoothing:
            each = smooth.unsqueeze(dim)
            grad -= each * _along(weights[0], dim, grad.dim()) if weights else each
        if grad.shape[dim]:
            at = nll.masked_fill(outside, 0).neg_()
            grad.scatter_add_(dim, local.unsqueeze(dim), at.unsqueeze(dim))
        return grad.to(dtype), None, None, None, None


def _along(weight: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Return class weights in a shape that broadcasts over rows and positions."""
    return weight.view([-1 if d == dim else 1 for d in range(dims)])


def _start_count(
    mesh: Communicator,
    axes: Axes,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> CollectiveHandle:
    """Start counting the targets of all ranks, weighted by class, while they compute losses."""
    counts = target != ignore_index
    if weight is None:
        own = counts.sum().to(torch.float32 if dtype.itemsize < 4 else dtype)
    else:
        own = weight[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()
    return mesh.start_all_reduce(own.detach(), axes)
