"""Parameters that several stages hold, in a stream: one owner updates, all others borrow.

Every holder's forward and backward of a microbatch read what the owner's forward of the same
microbatch read: the owner sends it with the forward's message whenever it is not as before. A
holder's gradient goes back with the backward's message, microbatch by microbatch, and is added up
in the order of one process (:mod:`fxpart.runtime.gradients.tied_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.gradients.tied_parameters import TiedParameterRoutes

Sums = Sequence[tuple[int, TiedParameterRoutes, torch.Tensor]]  # sending stage, parameter, gradient


class StageTiedParameters:
    """What one stage does for the parameters that it shares."""

    def __init__(self, layout: AsyncStageGraph, stage: int, module: nn.Module) -> None:
        """module: the stage's."""
        self._late = {source for source, target in layout.late if target == stage}
        parcels = [p for (s, _), p in layout.backward.items() if s == stage]
        parcels += [p for (_, t), p in layout.backward.items() if t == stage]
        parcels += [p for pair, p in layout.forward.items() if stage in pair]
        self._copies = {
            item.link.name: module.get_parameter(item.attribute[stage])
            for parcel in parcels
            for item in parcel.shared
        }
        self.involved = bool(self._copies)
        self._borrowed: dict[torch.Tensor, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor | None] = {}

    def begin(self) -> None:
        """A stream begins."""
        self._borrowed, self._totals = {}, {}

    def lent(self, items: Sequence[TiedParameterRoutes]) -> list[torch.Tensor]:
        """Copies of the owner's weights as its forward reads them now."""
        return [self._copies[item.link.name].detach().clone() for item in items]

    def borrow(self, items: Sequence[TiedParameterRoutes], tensors: Sequence[torch.Tensor]) -> None:
        """Take what the owner has sent: it holds from here on."""
        for item, tensor in zip(items, tensors, strict=True):
            self._borrowed[self._copies[item.link.name]] = tensor

    @property
    def borrowed(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """The stage's copies, and what they hold in the next microbatch."""
        return self._borrowed

    def before(self, sums: Sums) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Roots of the backward: parameters with the sums of later holders, later ones first."""
        found: dict[str, torch.Tensor] = {}
        for source, item, tensor in sums:
            if source not in self._late:
                name = item.link.name
                found[name] = found[name] + tensor if name in found else tensor
        for name in {item.link.name for source, item, _ in sums if source in self._late}:
            copy = self._copies[name]
            self._totals[name], copy.grad = copy.grad, None
        return [(self._copies[name], tensor) for name, tensor in found.items()]

    def after(self, sums: Sums) -> None:
        """Add what comes behind the stage's own part of the microbatch."""
        parts: dict[str, torch.Tensor] = {}
        for source, item, tensor in sums:
            if source in self._late:
                name = item.link.name
                parts[name] = parts[name] + tensor if name in parts else tensor
        for name, part in parts.items():
            copy, before = self._copies[name], self._totals.pop(name)
            total = part if copy.grad is None else part + copy.grad
            copy.grad = total if before is None else before.add_(total)

    def give(self, items: Sequence[TiedParameterRoutes]) -> list[torch.Tensor]:
        """The stage's sums of the microbatch, for the holder before it."""
        found = []
        for item in items:
            copy = self._copies[item.link.name]
            gradient, copy.grad = copy.grad, None
            if gradient is None:
                gradient = torch.zeros_like(copy)
            found.append(gradient.to_dense() if gradient.is_sparse else gradient.contiguous())
        return found
