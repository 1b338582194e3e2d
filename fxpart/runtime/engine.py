"""One pass of a batch through all stages: the local ranks' executors, and word of the others."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxpart.errors import FxpartError, Problem, error
from fxpart.program import ProgramSpec
from fxpart.runtime.agreement import lost, merge, problems_of
from fxpart.runtime.batch import Cut
from fxpart.runtime.executor import Executor, Failure, Feed
from fxpart.runtime.links import edges, torch_dtype
from fxpart.runtime.transport import PeerLostError, TransferTimeoutError, Transport
from fxpart.schedule.action import Schedule
from fxpart.schedule.builders import BUILDERS
from fxpart.schedule.lower import lower


@dataclass(frozen=True)
class Result:
    """What a pass gives: the loss (0-d, equal on every rank; None if the program has none)."""

    loss: torch.Tensor | None
    outputs: dict[str, dict[int, torch.Tensor]]


class Engine:
    """Runs batches through a program on this process's ranks.

    A failure on any rank raises the same FXP504 on every rank, and the transport stays usable; a
    failed transfer raises FXP503 or FXP504 and the engine can no longer be used.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        ranks: Sequence[int],
        transport: Transport,
        devices: Mapping[int, torch.device],
        *,
        schedule: str,
    ) -> None:
        """modules: by stage, for the stages of this process. ranks: the rank of each stage."""
        self.spec = spec
        self._modules = modules
        self._ranks = tuple(ranks)
        self._transport = transport
        self._devices = devices
        self._schedule = schedule
        self._edges = edges(spec)
        self._executors: dict[tuple[int, bool], list[Executor]] = {}
        self._losses = [
            stage.index for stage in spec.stages if spec.loss in [v.name for v in stage.outputs]
        ]
        self._used = {
            rank: {
                value.name
                for stage in spec.stages
                if self._ranks[stage.index] == rank
                for value, source in zip(stage.inputs, stage.sources, strict=True)
                if source < 0
            }
            for rank in transport.local
        }
        self.broken: str | None = None

    def run(
        self,
        cut: Cut,
        keys: Sequence[int],
        *,
        train: bool,
        gate: Callable[[], None],
        keep_outputs: bool = False,
    ) -> Result:
        """Forward all microbatches and, to train, backward; gradients add up in the parameters.

        gate: returns once all ranks are known to run the same step, or raises.
        """
        if self.broken is not None:
            raise error(
                "FXP504",
                where="this process",
                why=f"an earlier failure ended the connection: {self.broken}",
                fix="start the job again",
            )
        executors = self._get(len(cut.rows), train, keep_outputs)
        try:
            self._drive(executors, cut, keys, gate)
            return self._conclude(executors, cut)
        except FxpartError as cause:
            if any(executor.lost for executor in executors):
                self.broken = cause.problems[0].why
            raise
        except (TransferTimeoutError, PeerLostError) as cause:
            self.broken = str(cause)
            raise lost(self._transport.local[0], "the end of a step", cause) from cause
        except BaseException as cause:
            self.broken = type(cause).__name__
            raise

    def _get(self, microbatches: int, train: bool, keep_outputs: bool) -> list[Executor]:
        key = (microbatches, keep_outputs)
        if key not in self._executors:
            schedule = place(
                self._schedule if train else "forward", self.spec, self._ranks, microbatches
            )
            self._executors[key] = [
                Executor(
                    self.spec,
                    {s: m for s, m in self._modules.items() if self._ranks[s] == rank},
                    schedule,
                    rank,
                    self._transport,
                    self._devices[rank],
                    train=train,
                    keep_outputs=keep_outputs,
                )
                for rank in self._transport.local
            ]
        return self._executors[key]

    def _drive(
        self, executors: list[Executor], cut: Cut, keys: Sequence[int], gate: Callable[[], None]
    ) -> None:
        """Step the local ranks in turn until all are through."""
        runs = {e: e.run(self._feed(e.rank, cut, keys), gate) for e in executors}
        done = object()
        while runs:
            before = [e.position for e in runs]
            waiting = list(runs)
            for executor in waiting:
                if next(runs[executor], done) is done:
                    del runs[executor]
            if len(runs) == len(waiting) and before == [e.position for e in runs]:
                stuck = ", ".join(f"rank {e.rank} at {e.waiting()}" for e in runs)
                self.broken = "no rank could go on"
                raise error("FXP901", where=stuck, why="no rank can go on", fix="")

    def _feed(self, rank: int, cut: Cut, keys: Sequence[int]) -> Feed:
        used, device = self._used[rank], self._devices[rank]
        inputs = [
            {n: t if t.device == device else t.to(device) for n, t in piece.items() if n in used}
            for piece in cut.inputs
        ]
        return Feed(inputs, cut.sizes, cut.weights, keys)

    def _conclude(self, executors: list[Executor], cut: Cut) -> Result:
        """Tell every process the loss and whether all went well."""
        failures = [e.failure for e in executors if e.failure is not None]
        loss = None if failures else self._weighted_loss(executors, cut)
        bits = 0
        if loss is not None and loss.device.type == "cpu":
            bits = struct.unpack("<q", struct.pack("<d", loss.item()))[0]
        rows = self._transport.exchange([len(failures), bits])
        for executor in executors:
            executor.finish()
        if any(row[0] for row in rows):
            self._raise(failures)
        outputs = {name: found for e in executors for name, found in e.outputs.items()}
        if not self._losses:
            return Result(None, outputs)
        return Result(self._spread(loss, rows), outputs)

    def _weighted_loss(self, executors: list[Executor], cut: Cut) -> torch.Tensor | None:
        for executor in executors:
            if executor.losses:
                total: torch.Tensor | None = None
                for index, weight in enumerate(cut.weights):
                    part = executor.losses[index] * weight
                    total = part if total is None else total + part
                return total
        return None

    def _spread(self, loss: torch.Tensor | None, rows: list[list[int]]) -> torch.Tensor:
        """The loss on every process: as bits of a float64 on CPUs, by a broadcast on GPUs."""
        if loss is not None and len(rows) == 1:
            return loss
        root = self._ranks[self._losses[0]]
        stage = self.spec.stages[self._losses[0]]
        value = next(v for v in stage.outputs if v.name == self.spec.loss)
        dtype = torch_dtype(value.dtype)
        device = self._devices[self._transport.local[0]]
        if device.type == "cpu":
            number = struct.unpack("<d", struct.pack("<q", rows[root][1]))[0]
            return torch.tensor(number, dtype=dtype)
        tensor = torch.empty((), dtype=dtype, device=device) if loss is None else loss
        return self._transport.broadcast(tensor, root)

    def _raise(self, failures: list[Failure]) -> None:
        """One error on every process, naming each stage that failed."""
        mine = [_problem(failure) for failure in failures]
        problems = merge(self._transport.exchange_bytes(problems_of(mine)))
        raise FxpartError(problems) from (failures[0].cause if failures else None)


def place(name: str, spec: ProgramSpec, ranks: Sequence[int], microbatches: int) -> Schedule:
    """The named schedule for the program's stages on their ranks, with transfers.

    Raises FXP109 for an unknown name and for a rank with several stages or none.
    """
    if name not in BUILDERS:
        known = ", ".join(sorted(BUILDERS))
        raise error("FXP109", where=f"schedule={name!r}", why="not known", fix=f"one of {known}")
    stages = len(spec.stages)
    if sorted(ranks) != list(range(stages)):
        raise error(
            "FXP109",
            where=f"ranks={tuple(ranks)}",
            why=f"{stages} stages need {stages} ranks, one each",
            fix="",
        )
    found = edges(spec)
    schedule = BUILDERS[name](stages, microbatches, found)
    by_stage = dict(zip(schedule.stage_rank, schedule.ranks, strict=True))
    lists = tuple(by_stage[stage] for stage in sorted(range(stages), key=lambda s: ranks[s]))
    moved = Schedule(schedule.name, stages, microbatches, lists, tuple(ranks))
    return lower(moved, found)


def _problem(failure: Failure) -> Problem:
    action, cause = failure.action, failure.cause
    where = (
        f"rank {failure.rank}, stage {action.stage}, action {action}, "
        f"microbatch {action.microbatch}"
    )
    if isinstance(cause, FxpartError):
        first = cause.problems[0]
        return Problem(first.code, f"{where}: {first.where}", first.why, first.fix)
    return Problem(
        "FXP504",
        where,
        f"{type(cause).__name__}: {cause}",
        "nothing was updated; this step's gradients were dropped",
    )
