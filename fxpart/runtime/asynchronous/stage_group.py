"""All asynchronous stages of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from fxpart.errors import FxpartError
from fxpart.runtime.asynchronous.stage_channels import AsyncStagePlacement, describe_transfers
from fxpart.runtime.asynchronous.stage_executor import AsyncStageExecutor
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_optimizers import collect_stage_parameters, set_stage_delays
from fxpart.runtime.asynchronous.stage_updater import StageUpdater
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.engine import find_used_inputs
from fxpart.runtime.executor.instruction import StepInput
from fxpart.runtime.executor.routes import place_routes
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.mesh.mesh_ranks import MeshRank, get_pipeline_ranks
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.runtime.transport.interface import (
    BACKWARD,
    FORWARD,
)
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.asynchronous_channels import find_asynchronous_problems
from fxpart.schedule.versions import WeightVersionCounters

if TYPE_CHECKING:
    from fxpart.runtime.optimizer.trainer_optimizers import TrainerOptimizers
    from fxpart.runtime.trainer_parts import TrainerParts

Work = Callable[[AsyncStageExecutor], Iterator[None]]


class AsyncStageGroup:
    """The stage executors of this process, interleaved within a mesh rank.

    weights, executors, updates: by stage and mesh rank.
    """

    def __init__(
        self,
        parts: TrainerParts,
        optimizers: TrainerOptimizers,
        layout: AsyncStageGraph,
        versions: WeightVersionCounters,
    ) -> None:
        """Open the routes and create the weights and the executor of every stage."""
        transport = parts.transport
        pairs = [(*pair, FORWARD) for pair in layout.forward]
        pairs += [(*pair, BACKWARD) for pair in layout.backward]
        with convert_transport_errors(transport, "connecting the ranks"):
            transport.open(place_routes(pairs, parts.ranks), parts.first_device)
        self._parts, self._transport, self._local = parts, transport, parts.local
        self._used = {
            rank: find_used_inputs(parts.mesh_ranks, parts.ranks, rank) for rank in transport.local
        }
        self.weights: dict[Place, StageWeights] = {}
        self.updates: dict[Place, StageUpdater] = {}
        self.executors: dict[Place, AsyncStageExecutor] = {}
        if not parts.is_alone:
            self._verify_channels(layout, get_pipeline_ranks(parts.ranks, 0))
        owned = collect_stage_parameters(parts.state, owned=True)
        for mesh_rank in parts.mesh_ranks:
            for stage in sorted(mesh_rank.modules):
                place = stage, mesh_rank.index
                parameters = [p for _, p in owned[place]]
                self._add_weights(optimizers, versions, mesh_rank, stage, parameters)
                self._add_executor(layout, versions, mesh_rank, stage)

    def _add_weights(
        self,
        optimizers: TrainerOptimizers,
        versions: WeightVersionCounters,
        mesh_rank: MeshRank,
        stage: int,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Create the weights of a stage and their updates. parameters: those that it owns."""
        parts, options, module = self._parts, self._parts.options, mesh_rank.modules[stage]
        place = stage, mesh_rank.index
        optimizer = optimizers.by_place[place]
        set_stage_delays(optimizer, stage, options.mode, versions)
        weights = self.weights[place] = StageWeights(
            module, optimizer, options.mode, versions, stage,
            total_updates=options.total_updates, guard=options.guard,
        )  # fmt: skip
        if options.watch:
            weights.watch(options.watch)
        entries = parts.state.entries.values()
        total = sum(math.prod(entry.pieces.shape) for entry in entries if entry.trainable)
        share = sum(parameter.numel() for parameter in parameters) / max(total, 1)
        self.updates[place] = StageUpdater(
            MeshRank(mesh_rank.index, mesh_rank.spec, {stage: module}), parts.shards, weights,
            parameters, options, share=share, average=optimizers.average,
        )  # fmt: skip

    def _add_executor(
        self,
        layout: AsyncStageGraph,
        versions: WeightVersionCounters,
        mesh_rank: MeshRank,
        stage: int,
    ) -> None:
        parts, spec, place = self._parts, mesh_rank.spec, (stage, mesh_rank.index)
        pipeline_ranks = get_pipeline_ranks(parts.ranks, mesh_rank.index)
        rank = pipeline_ranks[stage]
        placement = AsyncStagePlacement(
            rank, mesh_rank.index, pipeline_ranks, parts.transport, parts.devices[rank],
            parts.is_alone, parts.local.has_threads, parts.events,
        )  # fmt: skip
        recompute = parts.options.recomputes(len(spec.stages)).get(stage, "none")
        table = StageSignature.of(
            spec, spec.stages[stage], mesh_rank.modules[stage], layout.found, False, recompute
        )
        self.executors[place] = AsyncStageExecutor(
            layout, table, placement, versions, self.weights[place], self.updates[place]
        )

    def _verify_channels(self, layout: AsyncStageGraph, stage_rank: Sequence[int]) -> None:
        """Raise FXP901 if the transfers could deadlock; equal for the other mesh ranks."""
        if len(set(stage_rank)) < len(stage_rank):
            return  # Stages of one rank run as their messages arrive, in no fixed order.
        early = self._transport.receives_ahead > 0
        problems = find_asynchronous_problems(describe_transfers(layout, stage_rank, early=early))
        if problems:
            raise FxpartError(problems)

    def minibatch(
        self, cuts: Sequence[MicrobatchSplit], keys: Sequence[int], *, closing: bool
    ) -> None:
        """Run one call on every stage. cuts: by mesh rank. closing: flush afterwards."""
        own = [mesh_rank.index for mesh_rank in self._parts.mesh_ranks]
        parts = dict(zip(own, cuts, strict=True))

        def work(executor: AsyncStageExecutor) -> Iterator[None]:
            cut = parts[executor.placement.mesh_rank]
            yield from executor.minibatch(self._batch(executor, cut, keys), closing=closing)
            if closing:
                yield from executor.flush()

        self._run(work)

    def flush(self) -> None:
        """Flush the pipeline: run all remaining backwards."""
        self._run(AsyncStageExecutor.flush)

    def begin(self, versions: WeightVersionCounters) -> None:
        """Start again with an empty pipeline."""
        for executor in self.executors.values():
            executor.weights.restart(versions.start)
            executor.begin(versions)

    def done(self) -> int:
        """Return the microbatches since the last flush; equal on all stages between two calls."""
        return next(iter(self.executors.values())).forwards

    def halt(self) -> None:
        """Stop all updates; work in flight completes with zeros."""
        for executor in self.executors.values():
            executor.halt()

    def _batch(
        self, executor: AsyncStageExecutor, cut: MicrobatchSplit, keys: Sequence[int]
    ) -> StepInput:
        rank = executor.placement.rank
        inputs = cut.taken(self._used[rank], self._parts.devices[rank])
        return StepInput(inputs, cut.sizes, cut.weights, keys)

    def _run(self, work: Work) -> None:
        self._local.check_whole()
        own = [mesh_rank.index for mesh_rank in self._parts.mesh_ranks]
        mine: dict[int, list[AsyncStageExecutor]] = {index: [] for index in own}
        for (_, mesh_rank), executor in sorted(self.executors.items()):
            mine[mesh_rank].append(executor)
        with self._local.watch(mine, "asynchronous training"):
            self._local.run(mine, lambda _, executor: work(executor))
