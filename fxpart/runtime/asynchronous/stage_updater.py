"""From a stage's gradients of one minibatch to its new weights, as soon as they are complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fxpart.runtime.embedding_tables import get_gradient_values
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.weights import StageWeights

Clip = Literal["stage", "delayed"]
CLIPS: tuple[Clip, ...] = ("stage", "delayed")


@dataclass(frozen=True)
class StageClipOptions:
    """How a stage's gradients are bounded without those of the other stages.

    norm: the largest global norm, None: any. kind: "stage": the stage's own norm is at most
    ``norm * sqrt(share)``, share being its part of all trainable numbers, so that the global norm
    is at most ``norm`` in any case; "delayed": scaled by the newest global norm that is known.
    value: the largest absolute value of any number.
    """

    norm: float | None
    kind: Clip
    value: float | None
    share: float


class StageUpdater:
    """Updates one stage of one lane.

    square: the squared norm of the last update's gradients before clipping, where it was computed.
    known: the newest global norm, for delayed clipping. skipped: the last update left the weights
    as they were, since gradients were not finite. waits: gradients are left for an update by hand.
    """

    def __init__(
        self,
        lane: MeshRank,
        held: OptimizerShards,
        weights: StageWeights,
        parameters: Sequence[nn.Parameter],
        clipping: StageClipOptions,
        *,
        norms: bool,
    ) -> None:
        """lane: with this stage's module alone. parameters: that the stage owns, in the model's
        order. norms: compute them in any case.
        """
        self._lane = lane
        self._shards = held
        self._weights = weights
        self._parameters = list(parameters)
        self._clipping = clipping
        self._norms = norms or clipping.norm is not None
        self._around = held.hooks(lane.index)
        self.square = 0.0
        self.known: float | None = None
        self.skipped = self.waits = False

    def begins(self, *, last: bool) -> None:
        """A backward begins; last: of its minibatch, so that sums over lanes may start in it."""
        if last and self._around is not None and not self.waits:
            self._shards.closing = True
            for stage in self._lane.modules:
                self._around.last(stage)

    def run(self, *, halted: bool) -> None:
        """The gradients are complete. halted: take part in sums over lanes, and no more."""
        if self.waits:
            return
        if halted:
            self._clear()
        self._shards.finish(self._lane)
        if not halted:
            self._clip()
            self.step()
        self._clear()

    def step(self) -> None:
        """Let the optimizer step; gradients start from nothing then."""
        self.skipped = not self._weights.update()
        self._clear()

    def _clip(self) -> None:
        found = self._clipping
        if self._norms:
            norm = self._norm()
            self.square = float(norm) ** 2
            if found.norm is not None:
                largest = found.norm * math.sqrt(found.share)
                if found.kind == "delayed" and self.known is not None:
                    norm, largest = torch.tensor(self.known), found.norm
                factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
                for gradient in self._gradients():
                    gradient.mul_(factor.to(gradient.device))
        if found.value is not None:
            for gradient in self._gradients():
                gradient.clamp_(-found.value, found.value)

    def _norm(self) -> torch.Tensor:
        """As :func:`fxpart.runtime.gradients.gradient_norm.compute_gradient_norms` computes it."""
        each = [torch.linalg.vector_norm(g, 2.0) for g in self._gradients()]
        if not each:
            return torch.zeros(())
        dtype = each[0].dtype
        for other in each[1:]:
            dtype = torch.promote_types(dtype, other.dtype)
        norm = torch.linalg.vector_norm(torch.stack([n.to(dtype) for n in each]), 2.0)
        assert isinstance(norm, torch.Tensor)
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        return [g for p in self._parameters if (g := get_gradient_values(p)) is not None]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
            self._shards.rows.drop(parameter)
