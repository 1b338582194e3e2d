"""Tied parameters of asynchronous stages: one owner updates, other stages use its weights.

The forward and backward of a microbatch read the same weights on every stage: the owner sends them
with the forward message when they have changed. Other stages send their gradients back with the
backward message, microbatch by microbatch; they are added in the order of a single process
(:mod:`fxpart.runtime.gradients.tied_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.gradients.communication import find_tied_entries
from fxpart.runtime.gradients.tied_parameters import TiedParameterRoutes
from fxpart.runtime.state.model_state import ModelState, StateEntry
from fxpart.runtime.transport.interface import STATE

# (sending stage, parameter, gradient)
Sums = Sequence[tuple[int, TiedParameterRoutes, torch.Tensor]]


class StageTiedParameters:
    """Weights and gradients of the tied parameters of one stage."""

    def __init__(self, layout: AsyncStageGraph, stage: int, module: nn.Module) -> None:
        """Find the tied parameters of a stage. module: of the stage."""
        self._late = {source for source, target in layout.late if target == stage}
        parcels = [p for (s, _), p in layout.backward.items() if s == stage]
        parcels += [p for (_, t), p in layout.backward.items() if t == stage]
        parcels += [p for pair, p in layout.forward.items() if stage in pair]
        self._parameters = {
            item.link.name: module.get_parameter(item.attribute[stage])
            for parcel in parcels
            for item in parcel.shared
        }
        self.involved = bool(self._parameters)
        self._received_weights: dict[torch.Tensor, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor | None] = {}

    def begin(self) -> None:
        """Reset after a flush."""
        self._received_weights, self._totals = {}, {}

    def copy_weights(self, items: Sequence[TiedParameterRoutes]) -> list[torch.Tensor]:
        """Return copies of the owner's weights as its forward reads them now."""
        return [self._parameters[item.link.name].detach().clone() for item in items]

    def set_weights(
        self, items: Sequence[TiedParameterRoutes], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Store the weights that the owner has sent; they apply from the next microbatch on."""
        for item, tensor in zip(items, tensors, strict=True):
            self._received_weights[self._parameters[item.link.name]] = tensor

    @property
    def received_weights(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """Return the weights of the next microbatch by the stage's tied parameter."""
        return self._received_weights

    def make_roots(self, gradients: Sums) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (parameter, gradient of later stages) roots for the backward."""
        found: dict[str, torch.Tensor] = {}
        for source, item, tensor in gradients:
            if source not in self._late:
                name = item.link.name
                found[name] = found[name] + tensor if name in found else tensor
        for name in {item.link.name for source, item, _ in gradients if source in self._late}:
            parameter = self._parameters[name]
            self._totals[name], parameter.grad = parameter.grad, None
        return [(self._parameters[name], tensor) for name, tensor in found.items()]

    def add_late_gradients(self, gradients: Sums) -> None:
        """Add the gradients that a single process adds after the stage's own."""
        parts: dict[str, torch.Tensor] = {}
        for source, item, tensor in gradients:
            if source in self._late:
                name = item.link.name
                parts[name] = parts[name] + tensor if name in parts else tensor
        for name, part in parts.items():
            parameter, make_roots = self._parameters[name], self._totals.pop(name)
            total = part if parameter.grad is None else part + parameter.grad
            parameter.grad = total if make_roots is None else make_roots.add_(total)

    def pop_gradients(self, items: Sequence[TiedParameterRoutes]) -> list[torch.Tensor]:
        """Pop the stage's gradients of the microbatch, to send to the previous stage."""
        found = []
        for item in items:
            parameter = self._parameters[item.link.name]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            found.append(gradient.to_dense() if gradient.is_sparse else gradient.contiguous())
        return found


def refresh_tied_weights(state: ModelState) -> None:
    """Copy the owner's weights to every stage with a tied parameter; every rank must call it.

    During asynchronous training stages use the weights sent with each microbatch; evaluation and
    saving read their own parameters.
    """
    with torch.no_grad():
        for _, entry in find_tied_entries(state):
            for mesh_rank in state.mesh_ranks:
                _refresh(state, entry, mesh_rank.index)


def _refresh(state: ModelState, entry: StateEntry, mesh_rank: int) -> None:
    transport, owner = state.transport, entry.spec.owner
    home = state.rank(owner, mesh_rank)
    for stage in sorted(entry.stages):
        copy, rank = entry.copies.get((stage, mesh_rank)), state.rank(stage, mesh_rank)
        if stage == owner:
            continue
        if home in transport.local:
            whole = entry.copies[owner, mesh_rank].detach()
            if copy is not None:
                copy.copy_(whole)
            else:
                transport.wait(transport.send(home, rank, STATE, whole.contiguous()))
        elif copy is not None:
            handle = transport.post(home, rank, STATE, copy.shape, copy.dtype, copy.device)
            copy.copy_(transport.wait(handle))
