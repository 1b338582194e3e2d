"""One pass of a batch through all stages: local executors, and the status of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from fxpart.collectives.all_to_all_embedding import cache_rows
from fxpart.diagnostics.rank_event import ALL
from fxpart.errors import error
from fxpart.plan.offload import offloads_activations
from fxpart.program.edges import find_stage_edges
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.executor.instruction import BackwardHooks, StageFailure, StepInput
from fxpart.runtime.executor.rank_program import RankProgram
from fxpart.runtime.executor.routes import find_routes
from fxpart.runtime.executor.step_executor import StepExecutor
from fxpart.runtime.gradients.tied_parameters import find_tied_transfers
from fxpart.runtime.mesh.mesh_ranks import (
    MeshRank,
    Ranks,
    find_receivers,
    get_pipeline_ranks,
    has_mesh_rank,
)
from fxpart.runtime.monitor.recorder import Recorder
from fxpart.runtime.transport.agreement import (
    AllRanksError,
    convert_transport_errors,
    encode_problems,
    merge_problems,
)
from fxpart.runtime.transport.interface import (
    PeerLostError,
    bits_to_float,
    float_to_bits,
)
from fxpart.schedule.action import Action, Schedule
from fxpart.schedule.make import make
from fxpart.schedule.measured_timeline import AGREE, END

if TYPE_CHECKING:
    from fxpart.runtime.trainer_parts import TrainerParts


@dataclass(frozen=True)
class PipelineResult:
    """The result of a pass: loss (0-d, equal on every rank; None without a loss) and outputs."""

    loss: torch.Tensor | None
    outputs: dict[str, dict[int, torch.Tensor]]


class PipelineEngine:
    """Runs batches through the mesh ranks of a program in this process.

    A failure on any rank raises the same FXP504 on every rank, and the transport stays usable. A
    failed transfer raises FXP503 or FXP504, and the engine cannot be used any more. If the mesh
    ranks of a stage are in several processes, a failure of a single mesh rank leaves the others in
    a collective until their timeout, which is a failed transfer, too. busy: of each process the
    nanoseconds of computation in the last pass, 0 if unknown.
    """

    def __init__(
        self,
        parts: TrainerParts,
        mesh_ranks: Sequence[MeshRank],
        schedule: str | Schedule,
        hooks: Callable[[int], BackwardHooks | None] | None = None,
    ) -> None:
        """Open the routes of the program; every rank must create the engine at the same time.

        mesh_ranks: this process's mesh ranks of the program, on the ranks of the trainer. hooks:
        returns per mesh rank the hooks around backwards.
        """
        self.spec = mesh_ranks[0].spec
        transport, devices, options = parts.transport, parts.devices, parts.options
        with convert_transport_errors(transport, "connecting the ranks"):
            transport.open(find_routes(self.spec, parts.ranks), devices[transport.local[0]])
        self._mesh_ranks = tuple(mesh_ranks)
        self._ranks = parts.ranks
        self._transport = transport
        self._devices = devices
        self._schedule = schedule
        self._local = parts.local
        self._hooks = hooks
        self._recompute = options.recomputes(len(self.spec.stages))
        self._offload = offloads_activations(options.offload)
        self._events = parts.events
        self._agrees = self._events.mark(AGREE, "wait", peer=ALL)
        self._ends = self._events.mark(END, "wait", peer=ALL)
        # The host's clock measures computation on a CPU, but only the launch of kernels on a GPU.
        self._seen = all(device.type == "cpu" for device in devices.values())
        self._executors: dict[tuple[int, bool], list[list[StepExecutor]]] = {}
        self._losses = [
            stage.index
            for stage in self.spec.stages
            if self.spec.loss in [v.name for v in stage.outputs]
        ]
        self._used = {
            rank: find_used_inputs(mesh_ranks, parts.ranks, rank) for rank in transport.local
        }
        self._recorder: Recorder | None = None
        self._exchange = transport.exchange
        self.busy: tuple[int, ...] = ()

    def record(self, recorder: Recorder | None) -> None:
        """Measure every pass from the next one on with a recorder; None: stop."""
        self._recorder = recorder
        exchange = self._transport.exchange
        self._exchange = exchange if recorder is None else recorder.timed(END, exchange)
        for mesh_ranks in self._executors.values():
            for mesh_rank, executors in zip(self._mesh_ranks, mesh_ranks, strict=True):
                for executor in executors:
                    self._attach(mesh_rank, executor)

    def _attach(self, mesh_rank: MeshRank, executor: StepExecutor) -> None:
        if self._recorder is None:
            executor.wrap(None)
            return
        ranks = get_pipeline_ranks(self._ranks, mesh_rank.index)
        hooks = self._recorder.get_rank_recorder(executor.rank).measure
        executor.wrap(partial(hooks, target=ranks.__getitem__))

    def run(
        self,
        cuts: Sequence[MicrobatchSplit],
        keys: Sequence[int],
        *,
        train: bool,
        gate: Callable[[], None],
        keep_outputs: bool = False,
        factor: float = 1.0,
    ) -> PipelineResult:
        """Run forward on all microbatches and, to train, backward, which accumulates gradients.

        cuts: the part of each mesh rank of this process. gate: returns once all ranks have agreed
        to run the same step, or raises. factor: multiplies the gradients, but not the loss.
        """
        self._local.check_whole()
        made = self._get(len(cuts[0].rows), train, keep_outputs)
        executors = {
            mesh_rank.index: mine for mesh_rank, mine in zip(self._mesh_ranks, made, strict=True)
        }
        parts = dict(zip(executors, cuts, strict=True))

        def begin(mesh_rank: int, executor: StepExecutor) -> Iterator[None]:
            feed = self._feed(executor.rank, parts[mesh_rank], keys, factor)
            return executor.run(feed, self._record_gate(executor, gate))

        if self._recorder is not None:
            self._recorder.record_batch_read()
        recomputed = [
            module for mesh_rank in self._mesh_ranks for stage, module in mesh_rank.modules.items()
            if train and self._recompute.get(stage, "none") != "none"
        ]  # fmt: skip
        with self._local.watch(executors, "the end of a step"):
            with cache_rows(recomputed):
                self._local.run(executors, begin)
            return self._exchange_results(
                [each for mine in made for each in mine], made[0], cuts[0]
            )

    def _get(self, microbatches: int, train: bool, keep_outputs: bool) -> list[list[StepExecutor]]:
        """Return per mesh rank its executors, one for each local rank."""
        key = (microbatches, keep_outputs)
        if key not in self._executors:
            self._executors[key] = [
                self._make(mesh_rank, microbatches, train, keep_outputs)
                for mesh_rank in self._mesh_ranks
            ]
            for mesh_rank, made in zip(self._mesh_ranks, self._executors[key], strict=True):
                for executor in made:
                    self._attach(mesh_rank, executor)
        return self._executors[key]

    def _make(
        self, mesh_rank: MeshRank, microbatches: int, train: bool, keep_outputs: bool
    ) -> list[StepExecutor]:
        ranks = get_pipeline_ranks(self._ranks, mesh_rank.index)
        name = self._schedule if train else "forward"
        schedule = resolve_schedule(
            name, mesh_rank.spec, ranks, microbatches, self._transport.ranks
        )
        hooks = None if self._hooks is None else self._hooks(mesh_rank.index)
        own = [k for k in range(len(ranks)) if has_mesh_rank(self._ranks, k, mesh_rank.index)]
        receivers = partial(find_receivers, self._ranks, mesh_rank=mesh_rank.index)
        programs = [
            RankProgram(
                mesh_rank.spec,
                {s: m for s, m in mesh_rank.modules.items() if ranks[s] == rank},
                schedule, rank, self._transport, self._devices[rank], receivers,
            )
            for rank in self._transport.local
            if rank in [ranks[stage] for stage in own]
        ]  # fmt: skip
        return [
            StepExecutor(
                program,
                train=train,
                keep_outputs=keep_outputs,
                on_failure=partial(self._local.leave, mesh_rank.index),
                threads=self._local.has_threads,
                hooks=hooks,
                recompute=self._recompute,
                offload=self._offload,
                events=self._events,
            )
            for program in programs
        ]

    def _record_gate(self, executor: StepExecutor, gate: Callable[[], None]) -> Callable[[], None]:
        def recorded_gate() -> None:
            self._events.write(self._agrees)
            gate()

        if self._recorder is None:
            return recorded_gate
        return self._recorder.timed(AGREE, recorded_gate, [executor.rank])

    def _feed(
        self, rank: int, cut: MicrobatchSplit, keys: Sequence[int], factor: float
    ) -> StepInput:
        inputs = cut.taken(self._used[rank], self._devices[rank])
        return StepInput(inputs, cut.sizes, tuple(w * factor for w in cut.weights), keys)

    def _exchange_results(
        self, executors: list[StepExecutor], first: list[StepExecutor], cut: MicrobatchSplit
    ) -> PipelineResult:
        """Exchange the loss and failures between all processes. first: of the first mesh rank."""
        failures = [e.failure for e in executors if e.failure is not None]
        # Mesh ranks that were only aborted add no information.
        failures = [f for f in failures if not isinstance(f.cause, PeerLostError)] or failures
        loss = None if failures else self._weighted_loss(first, cut)
        bits = 0
        if loss is not None and (loss.device.type == "cpu" or self.spec.replicas):
            bits = float_to_bits(loss.item())
        busy = sum(executor.busy for executor in executors) if self._seen else 0
        self._events.write(self._ends)
        # The padding makes this row longer than others: a rank that waits for another row times
        # out, and does not read it as a loss.
        rows = self._exchange([len(failures), bits, busy, 0, 0, 0])
        self.busy = tuple(row[2] for row in rows)
        for executor in executors:
            executor.finish()
        if any(row[0] for row in rows):
            self._raise(failures)
        outputs: dict[str, dict[int, torch.Tensor]] = {}
        for name, found in ((n, f) for e in executors for n, f in e.outputs.items()):
            outputs[name] = {**outputs.get(name, {}), **found}
        if not self._losses:
            return PipelineResult(None, outputs)
        return PipelineResult(self._share_loss(loss, rows), outputs)

    def _weighted_loss(
        self, executors: list[StepExecutor], cut: MicrobatchSplit
    ) -> torch.Tensor | None:
        """Return the sum over the microbatches whose losses are local."""
        total: torch.Tensor | None = None
        for executor in executors:
            for index, loss in sorted(executor.losses.items()):
                part = loss * cut.weights[index]
                total = part if total is None else total + part
        return total

    def _share_loss(self, loss: torch.Tensor | None, rows: list[list[int]]) -> torch.Tensor:
        """Return the loss on every process: from float64 bits on CPUs, by broadcast on GPUs."""
        if loss is not None and len(rows) == 1:
            return loss
        root = self._ranks[self._losses[0]][0]
        stage = self.spec.stages[self._losses[0]]
        value = next(v for v in stage.outputs if v.name == self.spec.loss)
        dtype = torch_dtype(value.dtype)
        device = self._devices[self._transport.local[0]]
        if device.type == "cpu" or self.spec.replicas:
            # Each replica has the losses of its own microbatches.
            roots = dict.fromkeys(self._ranks[stage][0] for stage in self._losses)
            numbers = [bits_to_float(rows[r][1]) for r in roots]
            return torch.tensor(sum(numbers), dtype=dtype, device=device)
        tensor = torch.empty((), dtype=dtype, device=device) if loss is None else loss
        return self._transport.broadcast(tensor, root)

    def _raise(self, failures: list[StageFailure]) -> None:
        """Raise one error on every process, with each failed stage."""
        mine = [
            failure.problem("correct the cause; nothing was updated, gradients were discarded")
            for failure in failures
        ]
        problems = merge_problems(self._transport.exchange_bytes(encode_problems(mine)))
        raise AllRanksError(problems) from (failures[0].cause if failures else None)


def find_used_inputs(mesh_ranks: Sequence[MeshRank], ranks: Ranks, rank: int) -> set[str]:
    """Return the user's inputs that a rank's stages take."""
    return {
        value.name
        for mesh_rank in mesh_ranks
        for stage in mesh_rank.spec.stages
        if ranks[stage.index][mesh_rank.index] == rank
        for value, source in zip(stage.inputs, stage.sources, strict=True)
        if source < 0
    }


def resolve_schedule(
    name: str | Schedule,
    spec: ProgramSpec,
    ranks: Sequence[int],
    microbatches: int,
    world: int | None = None,
) -> Schedule:
    """Return the schedule for the program's stages on their ranks.

    It includes transfers and is proved free of deadlock (:func:`fxpart.schedule.make.make`). name:
    a schedule's name, or computations. world: number of ranks, by default those with a stage; ranks
    of other mesh ranks do nothing. Raises FXP109 for an unknown name, a stage without a rank, and
    ranks that the schedule does not support.
    """
    stages = len(spec.stages)
    if len(ranks) != stages:
        raise error(
            "FXP109",
            where=f"ranks={tuple(ranks)}",
            why=f"each of the {stages} stages needs one rank",
            fix=f"pass {stages} ranks",
        )
    given = remap_ranks(name, ranks, world) if isinstance(name, Schedule) else name
    return make(
        given, ranks, microbatches, find_stage_edges(spec), world=world, replicas=spec.replicas,
        tied=find_tied_transfers(spec),
    )  # fmt: skip


def remap_ranks(
    schedule: Schedule, stage_rank: Sequence[int], world: int | None = None
) -> Schedule:
    """Return the schedule with stage k on rank stage_rank[k].

    Stages must share a rank exactly if they did before. world: number of ranks, some of which may
    have no stage; by default the largest rank plus one. Raises FXP109.
    """
    ranks = tuple(stage_rank)
    moves = dict(zip(schedule.stage_rank, ranks, strict=False))
    same = len(ranks) == len(schedule.stage_rank) and all(
        moves[old] == new for old, new in zip(schedule.stage_rank, ranks, strict=True)
    )
    count = max(ranks, default=-1) + 1 if world is None else world
    if not same or len(set(moves.values())) != len(moves) or max(ranks, default=-1) >= count:
        raise error(
            "FXP109",
            where=f"schedule {schedule.name}",
            why=f"its stages are on ranks {schedule.stage_rank}, which cannot be {ranks}",
            fix="give each of its ranks one of yours",
        )
    lists: list[tuple[Action, ...]] = [()] * count
    for old, new in moves.items():
        lists[new] = schedule.ranks[old]
    return replace(schedule, ranks=tuple(lists), stage_rank=ranks)
