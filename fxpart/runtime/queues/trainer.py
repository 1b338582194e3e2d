"""The trainer of copies that take microbatches from queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, Problem, error
from fxpart.runtime.asynchronous.fit import AsyncFit, check_fit_arguments
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
from fxpart.runtime.asynchronous.stage_optimizers import Optimizers, record_options
from fxpart.runtime.asynchronous.trainer_base import AsyncTrainerBase, RestorableStageWeights
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.engine import find_used_inputs, resolve_schedule
from fxpart.runtime.executor.instruction import StageFailure
from fxpart.runtime.executor.torch_compile import StageCompiler
from fxpart.runtime.fit import FitResult
from fxpart.runtime.mesh.mesh_ranks import get_pipeline_ranks
from fxpart.runtime.optimizer.factory import describe_groups, make_parameter_groups
from fxpart.runtime.optimizer.parameter_groups import Groups
from fxpart.runtime.queues.fault_tolerant_transport import FaultTolerantTransport
from fxpart.runtime.queues.messenger import InMemoryMessenger, ReplicaMessenger
from fxpart.runtime.queues.options import QueueOptions
from fxpart.runtime.queues.replica_groups import ReplicaGroupGraph, check_program
from fxpart.runtime.queues.replica_report import ReplicaReport, gather_replica_reports
from fxpart.runtime.queues.worker import ReplicaMinibatch, ReplicaWorker
from fxpart.runtime.queues.worker_factory import make_optimizers, make_worker
from fxpart.runtime.state.dtensor_state import DTensorState
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.transport.agreement import AllRanksError, agree, convert_transport_errors
from fxpart.schedule.queues.dispatcher import Dispatcher
from fxpart.schedule.queues.messages import (
    BarrierArrival,
    BarrierRelease,
    Event,
    FailureReport,
    StopOrder,
)
from fxpart.schedule.weight_modes import WeightMode, weight_mode

_AFTER = "go on from the last checkpoint, or saved weights"


class QueueTrainer(AsyncTrainerBase):
    """Trains copies of stages from queues; every rank makes one and gives it equal batches.

    queue: its options; dealt: of them the staleness of each group. optimizers: of this process, by
    stage and lane. last_rows: of the last global batch. lost: stages whose process has ended, as
    far as all ranks know.
    """

    shared_rows = True  # they are taken after each backward, and travel with their microbatches
    repeats = False  # who did which microbatch is another story each time

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments: see :class:`~fxpart.runtime.trainer_base.TrainerBase` and
        :class:`QueueOptions`.

        transport: of one process, or a
        :class:`~fxpart.runtime.queues.transport.FaultTolerantTransport`. FXP109 for what cannot be
        trained so.
        """
        self.queue = QueueOptions.taken(kwargs)
        self.optimizers: Optimizers = {}
        self.lost: tuple[int, ...] = ()
        super().__init__(*args, **kwargs)
        if not isinstance(self.optimizer, StageOptimizerFacade):
            raise error(
                "FXP109", where="a trainer from queues", why="it was given no optimizer",
                fix="program.trainer(optimizer=torch.optim.AdamW)",
            )  # fmt: skip
        self.last_rows = self._updates = self._applied = 0
        self.last_grad_norm: torch.Tensor | None = None
        self.listeners: list[Callable[[str], object]] = []
        self._losses = deque()
        self._asked: deque[tuple[int, tuple[tuple[int, int], ...]]] = deque()
        self._met = self._here = -1
        self._gone: tuple[int, ...] = ()
        self._first_ranks = [row[0] for row in self._ranks]
        self._broken = ""
        self._waits = self.events.mark("something to do", "wait", peer=ALL)
        self._over = self.events.mark(STEP, "end")
        layout = ReplicaGroupGraph.of(self.spec)
        self.dealt = self.queue.by_group(len(layout.groups))
        placed = resolve_schedule(
            self.options.schedule, self.spec, get_pipeline_ranks(self._ranks, 0),
            self.microbatches, self._transport.ranks,
        )  # fmt: skip
        queues = layout.queues(placed)
        first = 0 in self._transport.local
        self.dispatcher = Dispatcher(queues, self.dealt, self.queue.warm_up) if first else None
        self._mail: ReplicaMessenger
        if isinstance(self._transport, FaultTolerantTransport):
            self._mail = self._transport.wire
            self._transport.wire.start(self._first_ranks, self.dispatcher)
        else:
            assert self.dispatcher is not None, "one process has all ranks"
            self._mail = InMemoryMessenger(self.dispatcher)
        self._workers = {
            stage: make_worker(self, stage, layout) for stage in self._mesh_ranks[0].modules
        }
        self.update_options = record_options(
            self._transport, self.optimizer, self.queue.scheduler,
            [worker.weights for worker in self._workers.values()],
        )  # fmt: skip
        if isinstance(self._transport, FaultTolerantTransport):
            (worker,) = self._workers.values()
            self._transport.wire.serve = worker.serve

    # -- training -------------------------------------------------------------------------------

    def step(
        self, batch: Any, accumulate: bool = False, *, local: bool = False
    ) -> torch.Tensor | None:
        """One more minibatch into the queues; the loss that every rank knows by now.

        With staleness 0 that is this minibatch's, of which every copy has the update then; else of
        the one ``staleness`` calls before (the largest of all groups'), None before there is one;
        :meth:`drain` gives the rest.
        accumulate, local: refused, FXP109: each minibatch is an update, and any copy may take any
        of its rows. A failure on any rank is raised on every rank as the same error.
        """
        if accumulate:
            raise error(
                "FXP109", where="step(accumulate=True)", why="each minibatch is an update",
                fix="give larger batches, and more microbatches",
            )  # fmt: skip
        call = self.feed(batch, local=local)
        known = call - self.queue.allowed(call)  # a rank may have heard of later ones already
        found = None
        while self._losses and self._losses[0][0] <= known:
            found = self._losses.popleft()[1]
        return found

    def feed(self, batch: Any, *, local: bool = False) -> int:
        """As :meth:`step`, and losses wait to be :meth:`taken`; the number of this call."""
        self._check_whole()
        if not self.spec.loss:
            raise error(
                "FXP106",
                where="trainer",
                why="the program has no loss",
                fix="pass loss= to compile()",
            )
        if local:
            raise error(
                "FXP109", where="step(local=True)",
                why="whichever copy is free takes a microbatch: it needs all rows",
                fix="give every rank the global batch",
            )  # fmt: skip
        call = self.calls
        try:
            self._apply_user_changes()
            cut = self._feed.read(batch, self.microbatches)
        except FxpartError as cause:
            self._stop(list(cause.problems))
        self.events.step = call + 1
        self._submit_options(call)
        text = f"call {call}: {len(cut.rows)} microbatches of {sum(cut.rows)} rows {cut.sizes[0]}"
        text += f" optimizer options {self.update_options.digest}"
        for stage, worker in self._workers.items():
            worker.begin(call, self._batch(stage, cut), text, self.request.mine)
        self.last_rows = sum(cut.rows)
        self.calls += 1
        self._until(call - self.queue.allowed(call))
        self.events.write(self._over)
        return call

    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """As :meth:`drain`, with the calls."""
        self._check_whole()
        self._until(self.calls - 1)
        return self.taken()

    @property
    def in_flight(self) -> bool:
        """Whether a minibatch is not applied yet."""
        return self._applied < self.calls

    def spoil(self, cause: Exception) -> None:
        """Have it raised on every rank, by what each calls next."""
        found = cause if isinstance(cause, FxpartError) else _problem("the run", cause)
        self._announce(FailureReport(_rows(list(found.problems))))

    def again(self) -> int:
        """After :meth:`spoil`: wait for it."""
        self._until(self.calls)
        raise AssertionError("the training has ended")

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """As :meth:`fxpart.runtime.asynchronous.StreamTrainer.fit`."""
        return AsyncFit(self, batches, check_fit_arguments(run)).go()  # type: ignore[arg-type]

    def record(self, **_: Any) -> NoReturn:
        """Refused, FXP109: a recording is of a schedule's actions, and here there is none."""
        raise error(
            "FXP109", where="record()",
            why="there is no schedule whose actions could be measured",
            fix='routing="turns" has one',
        )  # fmt: skip

    @property
    def updates(self) -> int:
        """Minibatches that were applied, the same on every rank."""
        return self._updates

    @property
    def _next_update(self) -> int:
        return self._applied  # numbered as minibatches are

    @property
    def weight_mode(self) -> WeightMode:
        """Which weights a backward reads; with staleness 0 there is but one kind."""
        return self.queue.mode if any(self.dealt) else weight_mode("flush")

    def weights_of(self) -> Mapping[tuple[int, int], RestorableStageWeights]:
        """Of the copies of this process."""
        return {(stage, 0): worker.weights for stage, worker in self._workers.items()}

    def restart(self, updates: int, calls: int) -> None:
        """Minibatches are numbered as calls are: go on with that number."""
        for worker in self._workers.values():
            worker.weights.updates = calls  # versions are counted as minibatches are
            worker.restart(calls)
        if self.dispatcher is not None:
            self.dispatcher.restart(calls)
        self._updates, self.calls, self._applied = updates, calls, calls
        self._reload_options()
        self._losses.clear()
        self._asked.clear()

    def report(self) -> tuple[ReplicaReport, ...]:
        """Of every copy that lives: what it took and how stale it was. Every rank calls it."""
        self._settle()
        mine = [
            ReplicaReport(
                stage=stage, microbatches=worker.forwards, staleness=worker.staleness,
                updates=worker.applied, sets=worker.weights.most,
            )
            for stage, worker in self._workers.items()
        ]  # fmt: skip
        with convert_transport_errors(self._transport, "sharing reports"):
            return gather_replica_reports(self._transport, mine)

    def lose(self, stage: int) -> None:
        """In one process: have a copy end, as if its process had; to rehearse it."""
        assert isinstance(self._mail, InMemoryMessenger), "a process of its own can be killed"
        del self._workers[stage]
        self._mail.lose(stage)

    def close(self) -> None:
        """Finish what is in flight, unless the training has failed; then as any trainer."""
        if not self._broken:
            try:
                self._settle()
            except FxpartError:
                pass  # it was told, or will be, by what all ranks call
        super().close()

    # -- a call ---------------------------------------------------------------------------------

    def _until(self, minibatch: int) -> None:
        """Work until a minibatch is applied by all copies of this process."""
        self._work(lambda: all(w.applied > minibatch for w in self._workers.values()))
        first = next(iter(self._workers.values()))
        while first.losses:
            call, loss, asked = first.losses.popleft()
            self._asked.append((call, asked))
            self._applied = call + 1
            self._updates += 1
            if loss is not None:
                self._losses.append((call, self._as_loss(loss)))
        for worker in self._workers.values():
            worker.losses.clear()
        while self._asked and self._asked[0][0] <= minibatch:  # no further: all hear it here
            numbers = [0] * len(self._first_ranks)
            for copy, number in self._asked.popleft()[1]:
                numbers[self._first_ranks[copy]] = number
            self.request.store(numbers)

    def _work(self, done: Callable[[], bool]) -> None:
        """Take what comes and compute what is ready, each copy in turn."""
        while not done():
            moved = False
            for worker in list(self._workers.values()):
                if worker.copy not in self._workers:
                    continue  # it was lost meanwhile
                try:
                    moved |= self._hear(worker)
                    moved |= worker.turn()
                except AllRanksError as cause:
                    self._broken = cause.problems[0].why
                    raise
                except Exception as cause:
                    failure = StageFailure(self._ranks[worker.copy][0], worker.doing, cause)
                    self._stop([failure.problem(_AFTER)], cause)
            if not moved and not done():
                self.events.write(self._waits)
                self._mail.wait()

    def _hear(self, worker: ReplicaWorker) -> bool:
        """All that has come for a copy; whether anything has."""
        found = False
        while (letter := self._mail.take(worker.copy)) is not None:
            found = True
            said, tensors = letter
            if isinstance(said, StopOrder):
                raise AllRanksError([Problem(*each) for each in said.problems])
            if isinstance(said, BarrierRelease):
                self._here, self._gone = said.number, said.lost
            else:
                worker.take(said, tensors)
        return found

    def _announce(self, event: Event) -> None:
        for stage in self._workers:
            self._mail.tell(stage, event)

    def _stop(self, problems: list[Problem], cause: Exception | None = None) -> NoReturn:
        """Tell all ranks, and raise it here."""
        self._broken = problems[0].why
        self._announce(FailureReport(_rows(problems)))
        raise AllRanksError(problems) from cause

    def _settle(self) -> None:
        """For calls that look at the whole model: drain, meet, and stand in for those lost."""
        self._check_whole()
        self._until(self.calls - 1)
        self._met += 1
        self._announce(BarrierArrival(self._met))
        self._work(lambda: self._here >= self._met)
        if self._gone != self.lost:
            self._stand_in(self._gone)
        self._settle_options()

    def _stand_in(self, lost: tuple[int, ...]) -> None:
        """A living copy takes the place of each lost one in all that looks at the whole model."""
        groups = ReplicaGroupGraph.of(self.spec).groups
        ranks = list(self._ranks)
        modules = cast(dict[int, nn.Module], self._mesh_ranks[0].modules)
        heirs: dict[int, int] = {}
        for group in groups:
            living = [copy for copy in group if copy not in lost]
            heirs |= {copy: living[0] for copy in group if copy in lost}
        if isinstance(self._transport, FaultTolerantTransport):
            renamed = self._transport.shrink([self._first_ranks[copy] for copy in lost])
            ranks = [(renamed.get(rank, 0),) for rank in self._first_ranks]
            devices = {self._transport.local[0]: next(iter(self._devices.values()))}
            self._devices = devices
        for copy, heir in heirs.items():
            ranks[copy] = ranks[heir]
            modules.pop(copy, None)
            if heir in modules:
                modules[copy] = modules[heir]
        self._ranks, self.lost = tuple(ranks), lost
        self._state = ModelState(self._mesh_ranks, self._ranks, self._transport, self._devices)
        self._sharded_state = DTensorState(self._state, None)
        self.optimizers = {k: each for k, each in self.optimizers.items() if k[0] not in lost}
        self._eval, self._predictors = None, {}

    # -- inner ----------------------------------------------------------------------------------

    def _batch(self, stage: int, cut: MicrobatchSplit) -> ReplicaMinibatch:
        rank = self._ranks[stage][0]
        names = find_used_inputs(self._mesh_ranks, self._ranks, rank)
        return ReplicaMinibatch(cut.taken(names, self._devices[rank]), cut.weights, self._keys(cut))

    def _make_optimizer(self, given: Any, groups: Groups | None) -> torch.optim.Optimizer:
        """One for each copy of this process, with the same groups everywhere; the first."""

        def make() -> tuple[Optimizers, str]:
            self._groups = make_parameter_groups(given, groups, self._state.trainable())
            made = make_optimizers(self, given)
            names = " ".join(",".join(group.names) for group in self._groups)
            return made, f"{describe_groups(next(iter(made.values())))} {names}"

        self.optimizers = agree(self._transport, "the optimizer's parameter groups", make)
        return next(iter(self.optimizers.values()))

    def _compile(self, splits: bool) -> StageCompiler | None:
        asked: Mapping[str, object] = {"log_grad_norm": self.options.log_grad_norm}
        check_program(self.spec, self._ranks, self.options, asked)
        return super()._compile(splits)

    def _describe(self, optimizer: Any) -> str:
        return f"{super()._describe(optimizer)} queue {self.queue.describe()}"

    def _check_whole(self) -> None:
        if self._broken:
            raise error(
                "FXP504", where="this process",
                why=f"an earlier failure ended the training: {self._broken}", fix=_AFTER,
            )  # fmt: skip


def _rows(problems: list[Problem]) -> tuple[tuple[str, str, str, str], ...]:
    return tuple((p.code, p.where, p.why, p.fix) for p in problems)


def _problem(where: str, cause: Exception) -> FxpartError:
    fix = "correct it there; every rank has ended this run, and none waits"
    return error("FXP507", where=where, why=f"{type(cause).__name__}: {cause}", fix=fix)
