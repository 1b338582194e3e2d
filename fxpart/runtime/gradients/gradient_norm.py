"""The global gradient norm and clipping, identical to single-process training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fxpart.compat import foreach_multiply_, foreach_norm
from fxpart.runtime.embedding_tables import get_gradient_values
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.state.model_state import ModelState


@dataclass(frozen=True)
class GradientNorms:
    """The norm of each parameter's gradient, equal on every rank.

    names: in the model's order. each: float64 on the CPU. there: whether it has a gradient. total:
    the global norm (0-d), as torch.nn.utils.clip_grad_norm_ computes it.
    """

    names: tuple[str, ...]
    each: torch.Tensor
    there: torch.Tensor
    total: torch.Tensor

    def of(self, names: Sequence[str]) -> float:
        """Return the joint norm of some parameters' gradients."""
        wanted = set(names)
        picked = torch.tensor([name in wanted for name in self.names], dtype=torch.bool)
        return float(torch.linalg.vector_norm(self.each[picked & self.there], 2.0))


def compute_gradient_norms(state: ModelState, shards: OptimizerShards) -> GradientNorms:
    """Compute all norms, each tied parameter once, after tied gradients have been sent.

    Uses the operations of torch.nn.utils.clip_grad_norm_ in the model's order of parameters, so the
    result is bitwise identical to a single process if nothing is sharded.
    """
    names = [name for name, entry in state.entries.items() if entry.trainable]
    # Sums with zeros are exact, and float64 represents every smaller dtype exactly.
    table = torch.zeros(2, len(names), dtype=torch.float64)
    _add_norms(table, state, shards, names)
    state.transport.total(table)
    cut = torch.tensor([len(shards.pieces(name).sources) > 1 for name in names], dtype=torch.bool)
    norms = torch.where(cut, table[0].sqrt(), table[0])
    there = table[1] > 0
    present = norms[there].to(_norm_dtype(state, names))
    parameters = [shards.of(parameter) for _, parameter in state.parameters()]
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.linalg.vector_norm(present.to(device, non_blocking=True), 2.0)
    assert isinstance(total, torch.Tensor)
    return GradientNorms(tuple(names), norms, there, total)


def clip_gradient_norm(
    state: ModelState, shards: OptimizerShards, norm: torch.Tensor, largest: float
) -> None:
    """Scale all gradients so that their global norm, given as ``norm``, is at most ``largest``."""
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    held = (get_gradient_values(shards.of(parameter)) for _, parameter in state.parameters())
    for gradients in _group(gradient for gradient in held if gradient is not None):
        foreach_multiply_(gradients, factor.to(gradients[0].device, non_blocking=True))


def clip_both(
    state: ModelState,
    shards: OptimizerShards,
    norm: torch.Tensor | None,
    largest_norm: float | None,
    largest_value: float | None,
) -> None:
    """Clip the global norm, or each element. norm: before clipping, if ``largest_norm`` is."""
    if largest_norm is not None:
        assert norm is not None, "a norm that is clipped is computed first"
        clip_gradient_norm(state, shards, norm, largest_norm)
    if largest_value is not None:
        clip_gradient_value(state, shards, largest_value)


def clip_gradient_value(state: ModelState, shards: OptimizerShards, largest: float) -> None:
    """Clamp every element of every gradient to ``-largest`` ... ``largest``."""
    for _, parameter in state.parameters():
        gradient = get_gradient_values(shards.of(parameter))
        if gradient is not None:
            gradient.clamp_(-largest, largest)


def divide_gradients(state: ModelState, shards: OptimizerShards, divisor: float) -> None:
    """Divide all gradients after reduction, so that sums over batches become a mean."""
    for _, parameter in state.parameters():
        gradient = get_gradient_values(shards.of(parameter))
        if gradient is not None:
            gradient.div_(divisor)


def _add_norms(
    table: torch.Tensor, state: ModelState, shards: OptimizerShards, names: Sequence[str]
) -> None:
    """Add all norms to the table; squared where several mesh ranks own shards of the parameter."""
    columns, squared, gradients = [], [], []
    for column, name in enumerate(names):
        sources = shards.pieces(name).sources
        for mesh_rank, parameter in state.entries[name].owned().items():
            gradient = get_gradient_values(shards.of(parameter))
            if gradient is not None and mesh_rank in sources:
                columns.append(column)
                squared.append(len(sources) > 1)
                gradients.append(gradient)
    if not gradients:
        return
    norms = measure_gradients(gradients)
    at = torch.tensor(columns)
    table[0].index_add_(0, at, torch.where(torch.tensor(squared), norms.square(), norms))
    table[1].index_fill_(0, at, 1.0)


def measure_gradients(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each gradient in float64 on the CPU: one host wait per device."""
    found = torch.empty(len(gradients), dtype=torch.float64)
    positions = {id(gradient): index for index, gradient in enumerate(gradients)}
    by_device: dict[torch.device, list[tuple[list[int], torch.Tensor]]] = {}
    for group in _group(gradients):
        norms = torch.stack(foreach_norm(group)).double()
        indices = [positions[id(gradient)] for gradient in group]
        by_device.setdefault(norms.device, []).append((indices, norms))
    for parts in by_device.values():
        indices = [index for part, _ in parts for index in part]
        found[indices] = torch.cat([norms for _, norms in parts]).cpu()
    return found


def _group(gradients: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return the gradients of each dtype and device, for one kernel over all of them."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    return groups.values()


def _norm_dtype(state: ModelState, names: list[str]) -> torch.dtype:
    dtype = torch.float32
    found = [getattr(torch, state.entries[name].spec.dtype) for name in names]
    if found:
        dtype = found[0]
        for other in found[1:]:
            dtype = torch.promote_types(dtype, other)
    return dtype
