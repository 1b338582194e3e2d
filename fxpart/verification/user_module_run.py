"""Train the user's module in one process, for comparison with a partitioned run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.flat_batch import flatten_batch, unflatten_batch
from fxpart.capture.model_tensors import loss_prefix, state_of
from fxpart.rng import microbatch_key
from fxpart.runtime.batch.batch_totals import BatchTotals
from fxpart.verification.differences import distance
from fxpart.verification.reachable_code import ReachableCode
from fxpart.verification.reachable_state import ReachableState
from fxpart.verification.rounding_error import RoundingBounds
from fxpart.verification.single_process import draws_scalars, keyed_random, split_batch

TOLERANCE = 2e-5
NOISE = 1e-6  # fraction of the gradient norm below which a gradient is only rounding
_SHOWN = 20


@dataclass(frozen=True)
class UserModuleRun:
    """Losses and gradients per step, and the final tensors by name."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class UserModuleComparison:
    """loss, gradient: relative differences in the first step. differences: text, over all steps."""

    loss: float
    gradient: float
    differences: tuple[str, ...]


def run_written(
    captured: CapturedModel,
    graph: fx.GraphModule,
    factory: Any,
    batch: Any,
    steps: int,
    *,
    microbatches: int,
    seed: int,
    multiple: int,
    weight: BatchTotals | None = None,
    device: torch.device | None = None,
) -> UserModuleRun | None:
    """Train the user's module and loss, then restore them; return None without data.

    factory: creates the optimizer, like in
    :class:`~fxpart.verification.single_process.SingleProcessTrainer`. weight: computes the weight
    of a microbatch's loss; None to use its rows. device: where to train, by default where the
    module is; its tensors are there until this function returns.
    """
    if captured.source is None or any(t.device.type == "meta" for t in captured.state.values()):
        return None
    model, loss = captured.source
    live = {n: captured.state[n] for n in captured.parameters}
    before = {n: t.grad for n, t in live.items()}
    state = ReachableState.of(model, loss, ReachableCode.of(model, loss))
    names = [n for n, t in live.items() if t.requires_grad]
    given = [(n, live[n]) if getattr(factory, "named", False) else live[n] for n in names]
    home = {n: t.data for n, t in captured.state.items()}
    if device is not None:
        batch = _on_device(batch, device)
    try:
        for tensor in live.values():
            tensor.grad = None
        for name, tensor in captured.state.items():
            if device is not None and tensor.device != device:
                tensor.data = home[name].to(device)
        optimizer = factory(given) if given else None
        losses, gradients = [], []
        for step in range(steps):
            for tensor in live.values():
                tensor.grad = None
            pieces = _pieces(captured, batch, microbatches, multiple, weight)
            losses.append(_accumulated(captured, graph, batch, pieces, step, seed))
            gradients.append(_gradients(live))
            if optimizer is not None:
                optimizer.step()
        now = {**captured.state, **state_of(model, loss, loss_prefix(model)).tensors}
        end = {n: t.detach().clone() for n, t in now.items()}
    finally:
        for name, tensor in captured.state.items():
            if tensor.device != home[name].device:
                tensor.grad = None
                tensor.data = home[name]
        for name, tensor in live.items():
            tensor.grad = before[name]
        state.restore()
    return UserModuleRun(losses, gradients, end, captured.parameters)


def _on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device."""
    parts = flatten_batch(batch)
    return unflatten_batch(parts.tree, [t.to(device) for t in parts.tensors])


def _pieces(
    captured: CapturedModel,
    batch: Any,
    microbatches: int,
    multiple: int,
    weight: BatchTotals | None,
) -> list[tuple[list[Any], float]]:
    """Return the tensors of each microbatch, and its fraction of the batch's loss."""
    pieces = list(split_batch(captured, list(flatten_batch(batch).tensors), microbatches, multiple))
    if weight is None:
        return pieces
    names = [given.name for given in captured.inputs]
    found = [weight.of(dict(zip(names, piece, strict=True))) for piece, _ in pieces]
    numbers = [float(next(iter(each.values()))) for each in found]
    if not sum(numbers):
        return pieces
    return [(p, n / sum(numbers)) for (p, _), n in zip(pieces, numbers, strict=True)]


def _accumulated(
    captured: CapturedModel,
    graph: fx.GraphModule,
    batch: Any,
    pieces: Sequence[tuple[list[Any], float]],
    step: int,
    seed: int,
) -> torch.Tensor:
    """Return the weighted loss over all microbatches, after accumulating its gradients."""
    parts, scalars = flatten_batch(batch), draws_scalars(graph)
    assert captured.eager is not None, "a capture contains its module"
    total: torch.Tensor | None = None
    for index, (piece, weight) in enumerate(pieces):
        if not weight:
            continue  # nothing counts, so its own loss is 0 / 0
        with keyed_random(microbatch_key(seed, step, index), scalars=scalars):
            value = captured.eager(unflatten_batch(parts.tree, piece))[0]
            if value.requires_grad:
                value.backward(torch.full_like(value, weight))
        share = value.detach() * weight
        total = share if total is None else total + share
    assert total is not None, "a batch has at least one microbatch"
    return total


def _gradients(live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {n: t.grad for n, t in live.items() if t.grad is not None}
    return {n: g.to_dense() if g.is_sparse else g.clone() for n, g in found.items()}


def compare_written(
    written: UserModuleRun,
    losses: Sequence[torch.Tensor],
    gradients: Sequence[Mapping[str, torch.Tensor]],
    state: Mapping[str, torch.Tensor],
    known: RoundingBounds | None = None,
) -> UserModuleComparison:
    """Compare a partitioned run with the module's run. known: bounds of rounding."""
    limit = known or RoundingBounds()
    found: dict[str, None] = {}
    first, noise = (0.0, 0.0), set()
    for step, (mine, loss) in enumerate(zip(written.losses, losses, strict=False), 1):
        apart = distance(loss.cpu(), mine.cpu())
        if apart > max(TOLERANCE, limit.loss):
            found[f"the loss of step {step} by {apart:.1e}"] = None
        theirs, ours = gradients[step - 1], written.gradients[step - 1]
        floor = NOISE * sum(float(g.float().norm()) ** 2 for g in ours.values()) ** 0.5
        worst = 0.0
        for name in written.parameters:
            size = _gradient_distance(theirs.get(name), ours.get(name), floor)
            if name in ours and float(ours[name].float().norm()) <= floor:
                noise.add(name)
                continue
            worst = max(worst, size)
            if size > max(TOLERANCE, limit.gradient.get(name, 0.0)):
                found.setdefault(f"the gradient of {name} by {size:.1e} in step {step}")
        if step == 1:
            first = apart, worst
    for name, tensor in state.items():
        if name in written.state and name not in noise:
            size = distance(tensor.cpu(), written.state[name].cpu())
            if size > max(TOLERANCE, limit.state.get(name, 0.0)):
                found[f"{name} by {size:.1e} at the end"] = None
    return UserModuleComparison(*first, tuple(found)[:_SHOWN])


def _gradient_distance(a: torch.Tensor | None, b: torch.Tensor | None, floor: float) -> float:
    if a is None or b is None:
        left = a if b is None else b
        return 0.0 if left is None or not bool(left.any()) else float("inf")
    return distance(a.cpu(), b.cpu(), floor)
