"""All asynchronous stages of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.errors import FxpartError, error
from fxpart.runtime.asynchronous.stage_channels import AsyncStagePlacement, describe_transfers
from fxpart.runtime.asynchronous.stage_executor import AsyncMinibatch, AsyncStageExecutor
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.asynchronous.stage_updater import StageUpdater
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.engine import find_used_inputs
from fxpart.runtime.executor.cooperative_scheduler import run_cooperatively
from fxpart.runtime.executor.recompute import Mode
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.executor.transfer_routes import place_routes
from fxpart.runtime.mesh.communicators import MeshCommunicators
from fxpart.runtime.mesh.mesh_ranks import MeshRank, MeshRankThreads, Ranks, get_pipeline_ranks
from fxpart.runtime.state.model_state import Place
from fxpart.runtime.transport.agreement import convert_transport_errors, make_lost_peer_error
from fxpart.runtime.transport.interface import (
    BACKWARD,
    FORWARD,
    PeerLostError,
    TransferTimeoutError,
    Transport,
)
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.asynchronous_channels import find_asynchronous_problems
from fxpart.schedule.versions import WeightVersionCounters

Work = Callable[[AsyncStageExecutor], Iterator[None]]


class AsyncStageGroup:
    """The stage executors of this process, interleaved within a mesh rank.

    executors, updates: by stage and mesh rank. broken: failure that ended the training, or None.
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
        meshes: MeshCommunicators | None,
        mesh_rank_threads: MeshRankThreads,
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
        self._meshes = meshes
        self._threads = mesh_rank_threads
        self._used = {rank: find_used_inputs(mesh_ranks, ranks, rank) for rank in transport.local}
        self.updates = dict(updates)
        self.broken: str | None = None
        self.executors: dict[Place, AsyncStageExecutor] = {}
        alone = len(transport.local) == transport.ranks
        if not alone:
            self._verify_channels(layout, get_pipeline_ranks(ranks, 0))
        for mesh_rank in mesh_ranks:
            pipeline_ranks = get_pipeline_ranks(ranks, mesh_rank.index)
            for stage, module in sorted(mesh_rank.modules.items()):
                place, rank = (stage, mesh_rank.index), pipeline_ranks[stage]
                threads = meshes is not None and meshes.threads
                placement = AsyncStagePlacement(
                    rank,
                    mesh_rank.index,
                    pipeline_ranks,
                    transport,
                    devices[rank],
                    alone,
                    threads,
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
            yield from executor.minibatch(
                self._batch(executor, cut, keys), cut.sizes, closing=closing
            )
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
    ) -> AsyncMinibatch:
        rank = executor.placement.rank
        inputs = cut.taken(self._used[rank], self._devices[rank])
        return AsyncMinibatch(inputs, cut.weights, keys)

    def _run(self, work: Work) -> None:
        if self.broken is not None:
            raise error(
                "FXP504",
                where="this process",
                why=f"an earlier failure ended the training: {self.broken}",
                fix="restart the job from its last checkpoint",
            )
        drives = {
            mesh_rank.index: partial(self._drive, mesh_rank, work) for mesh_rank in self._mesh_ranks
        }
        try:
            self._threads.run_all(drives)
        except FxpartError as cause:
            self.broken = cause.problems[0].why
            raise
        except (TransferTimeoutError, PeerLostError) as cause:
            self.broken = str(cause)
            raise make_lost_peer_error(
                self._transport.local[0], "asynchronous training", cause
            ) from cause
        except BaseException as cause:
            self.broken = type(cause).__name__
            raise
        finally:
            if self._meshes is not None:
                self._meshes.recover()

    def _drive(self, mesh_rank: MeshRank, work: Work) -> None:
        """Advance the stages of a mesh rank in round-robin order until all are done."""

        def leave_if_halted(executor: AsyncStageExecutor) -> None:
            """Release other mesh ranks that wait for a mesh rank with a failed stage."""
            if executor.halted and self._meshes is not None:
                self._meshes.leave(mesh_rank.index, "a stage of this mesh rank has failed")

        mine = [self.executors[stage, mesh_rank.index] for stage in sorted(mesh_rank.modules)]
        for executor in mine:
            leave_if_halted(executor)
        runs = {executor: work(executor) for executor in mine}
        stuck = run_cooperatively(runs, lambda executor: executor.position, after=leave_if_halted)
        if stuck:
            where = ", ".join(f"rank {r.placement.rank} at {r.doing}" for r in stuck)
            raise error("FXP901", where=where, why="deadlock: no stage can continue", fix="")
