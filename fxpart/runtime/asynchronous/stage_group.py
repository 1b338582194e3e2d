"""All asynchronous stages of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.errors import FxpartError
from fxpart.runtime.asynchronous.stage_channels import AsyncStagePlacement, describe_transfers
from fxpart.runtime.asynchronous.stage_executor import AsyncStageExecutor
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_optimizers import collect_stage_parameters, set_stage_delays
from fxpart.runtime.asynchronous.stage_updater import StageClipOptions, StageUpdater
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.engine import find_used_inputs
from fxpart.runtime.executor.instruction import StepInput
from fxpart.runtime.executor.local_executors import LocalExecutors
from fxpart.runtime.executor.recompute import Mode
from fxpart.runtime.executor.routes import place_routes
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.mesh.mesh_ranks import MeshRank, Ranks, get_pipeline_ranks
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.transport.agreement import convert_transport_errors
from fxpart.runtime.transport.interface import (
    BACKWARD,
    FORWARD,
    Transport,
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

    executors, updates: by stage and mesh rank.
    """

    def __init__(
        self,
        mesh_ranks: Sequence[MeshRank],
        ranks: Ranks,
        transport: Transport,
        devices: Mapping[int, torch.device],
        layout: AsyncStageGraph,
        versions: WeightVersionCounters,
        *,
        weights: Mapping[Place, StageWeights],
        updates: Mapping[Place, StageUpdater],
        local: LocalExecutors,
        recompute: Mapping[int, Mode],
        events: FlightRecorder,
    ) -> None:
        """Open the routes and create the executors.

        Arguments as for :class:`fxpart.runtime.engine.PipelineEngine`.
        """
        pairs = [(*pair, FORWARD) for pair in layout.forward]
        pairs += [(*pair, BACKWARD) for pair in layout.backward]
        with convert_transport_errors(transport, "connecting the ranks"):
            transport.open(place_routes(pairs, ranks), devices[transport.local[0]])
        self._mesh_ranks = tuple(mesh_ranks)
        self._devices = devices
        self._transport = transport
        self._local = local
        self._used = {rank: find_used_inputs(mesh_ranks, ranks, rank) for rank in transport.local}
        self.updates = dict(updates)
        self.executors: dict[Place, AsyncStageExecutor] = {}
        alone = len(transport.local) == transport.ranks
        if not alone:
            self._verify_channels(layout, get_pipeline_ranks(ranks, 0))
        for mesh_rank in mesh_ranks:
            pipeline_ranks = get_pipeline_ranks(ranks, mesh_rank.index)
            for stage, module in sorted(mesh_rank.modules.items()):
                place, rank = (stage, mesh_rank.index), pipeline_ranks[stage]
                placement = AsyncStagePlacement(
                    rank,
                    mesh_rank.index,
                    pipeline_ranks,
                    transport,
                    devices[rank],
                    alone,
                    local.has_threads,
                    events,
                )
                table = StageSignature.of(
                    mesh_rank.spec, mesh_rank.spec.stages[stage], module, layout.found, False,
                    recompute.get(stage, "none"),
                )  # fmt: skip
                self.executors[place] = AsyncStageExecutor(
                    layout, table, placement, versions, weights[place], updates[place]
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
        parts = {
            mesh_rank.index: cut for mesh_rank, cut in zip(self._mesh_ranks, cuts, strict=True)
        }

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
        inputs = cut.taken(self._used[rank], self._devices[rank])
        return StepInput(inputs, cut.sizes, cut.weights, keys)

    def _run(self, work: Work) -> None:
        self._local.check_whole()
        mine: dict[int, list[AsyncStageExecutor]] = {each.index: [] for each in self._mesh_ranks}
        for (_, mesh_rank), executor in sorted(self.executors.items()):
            mine[mesh_rank].append(executor)
        with self._local.watch(mine, "asynchronous training"):
            self._local.run(mine, lambda _, executor: work(executor))


def build_stages(
    parts: TrainerParts,
    optimizers: TrainerOptimizers,
    layout: AsyncStageGraph,
    versions: WeightVersionCounters,
) -> tuple[dict[Place, StageWeights], AsyncStageGroup]:
    """Build the weights and the executor of every stage of this process."""
    options, state = parts.options, parts.state
    mine = collect_stage_parameters(state, owned=True)
    total = sum(
        math.prod(entry.pieces.shape) for entry in state.entries.values() if entry.trainable
    )
    weights: dict[Place, StageWeights] = {}
    updates: dict[Place, StageUpdater] = {}
    for mesh_rank in parts.mesh_ranks:
        for stage, module in sorted(mesh_rank.modules.items()):
            place = stage, mesh_rank.index
            optimizer = optimizers.by_place[place]
            set_stage_delays(optimizer, stage, options.mode, versions)
            weights[place] = StageWeights(
                module, optimizer, options.mode, versions, stage,
                total_updates=options.total_updates, guard=options.guard,
            )  # fmt: skip
            if options.watch:
                weights[place].watch(options.watch)
            numel = sum(parameter.numel() for _, parameter in mine[place])
            clipping = StageClipOptions(
                options.clip_norm, options.clip, options.clip_value, numel / max(total, 1)
            )
            updates[place] = StageUpdater(
                MeshRank(mesh_rank.index, mesh_rank.spec, {stage: module}),
                parts.shards, weights[place],
                [p for _, p in mine[place]], clipping,
                norms=options.log_grad_norm, average=optimizers.average,
            )  # fmt: skip
    stages = AsyncStageGroup(
        parts.mesh_ranks, parts.ranks, parts.transport, parts.devices, layout,
        versions, weights=weights, updates=updates, local=parts.local,
        recompute=options.recomputes(len(parts.spec.stages)),
        events=parts.events,
    )  # fmt: skip
    return weights, stages
