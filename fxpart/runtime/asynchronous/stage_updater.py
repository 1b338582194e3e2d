"""Clipping and optimizer step of one stage, as soon as its gradients are complete."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fxpart.runtime.embedding_tables import get_gradient_values
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards
from fxpart.runtime.optimizer.weight_average import WeightAverage
from fxpart.runtime.state.written_buffers import WrittenBuffers
from fxpart.runtime.trainer_options import TrainerOptions
from fxpart.runtime.weights import StageWeights


class StageUpdater:
    """Updates one stage of one mesh rank.

    square: squared gradient norm of the last update before clipping, if computed. known: newest
    global norm, for delayed clipping. skipped: whether the last update was skipped because of
    non-finite gradients. deferred: leave the gradients to an explicit :meth:`step`.
    """

    def __init__(
        self,
        mesh_rank: MeshRank,
        shards: OptimizerShards,
        weights: StageWeights,
        parameters: Sequence[torch.Tensor],
        options: TrainerOptions,
        *,
        share: float,
        average: WeightAverage | None = None,
    ) -> None:
        """Create an updater.

        mesh_rank: mesh rank with this stage's module only. parameters: owned by the stage, in model
        order. share: their part of all elements of the model. average: continued by every update.
        """
        self._mesh_rank = mesh_rank
        self._shards = shards
        self._weights = weights
        self._parameters = list(parameters)
        self._options, self._share = options, share
        self._average = average
        self._norms = options.log_grad_norm or options.clip_norm is not None
        self._backward_hooks = shards.hooks(mesh_rank.index)
        self.square = 0.0
        self.known: float | None = None
        self.skipped = self.deferred = False
        self._buffers = WrittenBuffers(
            tensor
            for stage in mesh_rank.modules
            for tensor in mesh_rank.list_written(stage)
            if not isinstance(tensor, nn.Parameter)
        )

    def begin(self) -> None:
        """Store the buffers, with an empty pipeline."""
        if self._weights.guard:
            self._buffers.store()

    def begin_backward(self, *, last: bool) -> None:
        """Prepare a backward. last: of its minibatch, so that the gradient reduction may start."""
        if last and self._backward_hooks is not None and not self.deferred:
            self._shards.closing = True
            for stage in self._mesh_rank.modules:
                self._backward_hooks.last(stage)

    def reduce(self, *, halted: bool = False) -> None:
        """Reduce the gradients over mesh ranks. halted: only take part, with no gradients."""
        if self.deferred:
            return
        if halted:
            self.clear()
        self._shards.finish(self._mesh_rank)

    def update(self) -> None:
        """Clip the reduced gradients and step."""
        if not self.deferred:
            self._clip()
            self.step()

    def discard(self) -> None:
        """Drop the reduced gradients of a halted stage."""
        if not self.deferred:
            self.clear()

    def step(self) -> None:
        """Step the optimizer and clear the gradients.

        If that is skipped, buffers that are not finite return to their last finite values. Later
        forwards have written them already, so that the values before this minibatch are lost.
        """
        self.skipped = not self._weights.update()
        if self.skipped:
            self._buffers.restore_finite()
        elif self._weights.guard:
            self._buffers.store_finite()
        if self._average is not None and not self.skipped:
            self._average.update(self._parameters)
        self.clear()

    def _clip(self) -> None:
        """Clip without the gradients of other stages.

        By ``clip="stage"`` the global norm is at most ``clip_norm``, as the stages' shares of all
        elements sum to 1.
        """
        options = self._options
        if self._norms:
            norm = self._norm()
            self.square = float(norm) ** 2
            if options.clip_norm is not None:
                largest = options.clip_norm * math.sqrt(self._share)
                if options.clip == "delayed" and self.known is not None:
                    norm, largest = torch.tensor(self.known), options.clip_norm
                factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
                for gradient in self._gradients():
                    gradient.mul_(factor.to(gradient.device))
        if options.clip_value is not None:
            for gradient in self._gradients():
                gradient.clamp_(-options.clip_value, options.clip_value)

    def _norm(self) -> torch.Tensor:
        """Compute the norm as
        :func:`fxpart.runtime.gradients.gradient_norm.compute_gradient_norms`.
        """
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

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
            self._shards.rows.drop(parameter)
