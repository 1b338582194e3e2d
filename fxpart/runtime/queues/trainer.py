"""Trainer of replicated stages that take microbatches from queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, Problem, error
from fxpart.program.replica_groups import ReplicaGroupGraph
from fxpart.runtime.asynchronous.fit import AsyncFit, check_fit_arguments
from fxpart.runtime.asynchronous.optimizer_facade import StageOptimizerFacade
from fxpart.runtime.asynchronous.stage_optimizers import Optimizers, record_options
from fxpart.runtime.asynchronous.stage_report import ReplicaReport, gather_replica_reports
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
from fxpart.runtime.queues.options import QueueOptions, check_program
from fxpart.runtime.queues.worker import ReplicaMinibatch, ReplicaWorker
from fxpart.runtime.queues.worker_factory import make_optimizers, make_worker
from fxpart.runtime.state.dtensor_state import DTensorState
from fxpart.runtime.state.model_state import ModelState
from fxpart.runtime.trainer_options import check_accumulate
from fxpart.runtime.transport.agreement import AllRanksError, agree, convert_transport_errors
from fxpart.schedule.queues.dispatcher import Dispatcher
from fxpart.schedule.queues.messages import (
    BarrierArrival,
    BarrierRelease,
    Event,
    FailureReport,
    StopOrder,
)
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode

_FIX = "restart from the last checkpoint or saved weights"


class QueueTrainer(AsyncTrainerBase):
    """Trains replicated stages from queues; every rank makes one and passes equal batches.

    queue: its options. dealt: staleness of each group. optimizers: of this process, by stage and
    mesh rank. last_rows: rows of the last global batch. lost: stages whose process has ended, as
    far as all ranks know.
    """

    kind = "queue"
    shared_rows = True  # intercepted after each backward, and sent with their microbatches
    repeats = False  # a repeated run assigns microbatches differently

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a trainer; see :class:`~fxpart.runtime.trainer_base.TrainerBase` and
        :class:`~fxpart.runtime.queues.options.QueueOptions`.

        transport: of one process, or a
        :class:`~fxpart.runtime.queues.fault_tolerant_transport.FaultTolerantTransport`. FXP109 for
        programs that cannot be trained from queues.
        """
        self.queue = QueueOptions.pop(kwargs)
        self.optimizers: Optimizers = {}
        self.lost: tuple[int, ...] = ()
        super().__init__(*args, **kwargs)
        if not isinstance(self.optimizer, StageOptimizerFacade):
            raise error(
                "FXP109", where="a queue trainer", why="no optimizer was given",
                fix="use program.trainer(optimizer=torch.optim.AdamW)",
            )  # fmt: skip
        self.last_rows = self._updates = self._applied = 0
        self.last_grad_norm: torch.Tensor | None = None
        self.listeners: list[Callable[[str], object]] = []
        self._losses = deque()
        self._pending_requests: deque[tuple[int, tuple[tuple[int, int], ...]]] = deque()
        self._barriers_entered = self._barriers_released = -1
        self._lost_at_barrier: tuple[int, ...] = ()
        self._ranks_of_replicas = [row[0] for row in self._ranks]
        self._broken = ""
        self._wait_mark = self.events.mark("messages of other ranks", "wait", peer=ALL)
        self._step_end_mark = self.events.mark(STEP, "end")
        layout = ReplicaGroupGraph.of(self.spec)
        self.dealt = self.queue.by_group(len(layout.groups))
        placed = resolve_schedule(
            self.options.schedule, self.spec, get_pipeline_ranks(self._ranks, 0),
            self.microbatches, self._transport.ranks,
        )  # fmt: skip
        queues = layout.queues(placed)
        first = 0 in self._transport.local
        self.dispatcher = Dispatcher(queues, self.dealt, self.queue.warm_up) if first else None
        self._messenger: ReplicaMessenger
        if isinstance(self._transport, FaultTolerantTransport):
            self._messenger = self._transport.wire
            self._transport.wire.start(self._ranks_of_replicas, self.dispatcher)
        else:
            assert self.dispatcher is not None, "one process has all ranks"
            self._messenger = InMemoryMessenger(self.dispatcher)
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
        """Submit a minibatch and return the newest loss that every rank knows.

        With staleness 0 it is the loss of this minibatch, which every replica has applied;
        otherwise that of the minibatch ``staleness`` calls before (largest of all groups), or None
        before the first one. :meth:`drain` returns the remaining losses. accumulate, local:
        unsupported, FXP109: each minibatch is an update, and any replica may compute any of its
        rows. A failure on any rank is raised on every rank as the same error.
        """
        check_accumulate(accumulate)
        if accumulate:
            raise error(
                "FXP109", where="step(accumulate=True)", why="each minibatch is an update",
                fix="use larger batches and more microbatches",
            )  # fmt: skip
        call = self.submit(batch, local=local)
        known = call - self.queue.allowed(call)  # a rank may know later losses already
        found = None
        while self._losses and self._losses[0][0] <= known:
            found = self._losses.popleft()[1]
        return found

    def submit(self, batch: Any, *, local: bool = False) -> int:
        """Submit a minibatch and return the number of the call; :meth:`pop_losses` returns
        losses.
        """
        self._check_not_failed()
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
                why="any replica may compute any microbatch, so each rank needs all rows",
                fix="pass the global batch on every rank",
            )  # fmt: skip
        call = self.calls
        try:
            self._apply_user_changes()
            cut = self._feed.read(batch, self.microbatches)
        except FxpartError as cause:
            self._stop_all(list(cause.problems))
        self.events.step = call + 1
        self._submit_options(call)
        text = f"call {call}: {len(cut.rows)} microbatches of {sum(cut.rows)} rows {cut.sizes[0]}"
        text += f" optimizer options {self.update_options.digest}"
        for stage, worker in self._workers.items():
            worker.begin(call, self._batch(stage, cut), text, self.request.mine)
        self.last_rows = sum(cut.rows)
        self.calls += 1
        self._work_until(call - self.queue.allowed(call))
        self.events.write(self._step_end_mark)
        return call

    def finish(self) -> list[tuple[int, torch.Tensor]]:
        """Flush the pipeline; return the remaining losses with their calls."""
        self._check_not_failed()
        self._work_until(self.calls - 1)
        return self.pop_losses()

    @property
    def in_flight(self) -> bool:
        """Return whether a minibatch has not been applied yet."""
        return self._applied < self.calls

    def abort(self, cause: Exception) -> None:
        """Raise ``cause`` on every rank, in its next call."""
        found = cause if isinstance(cause, FxpartError) else _make_error("the run", cause)
        self._announce(FailureReport(_to_rows(list(found.problems))))

    def repeat(self) -> int:
        """Wait for the failure after :meth:`abort`."""
        self._work_until(self.calls)
        raise AssertionError("the training has ended")

    def fit(self, batches: Any, **run: Any) -> FitResult:
        """Train as :meth:`fxpart.runtime.asynchronous.AsyncTrainer.fit`."""
        return AsyncFit(self, batches, check_fit_arguments(run)).go()  # type: ignore[arg-type]

    def record(self, **_: Any) -> NoReturn:
        """Raise FXP109: a recording needs the actions of a schedule, and queues have none."""
        raise error(
            "FXP109", where="record()",
            why="queues have no schedule whose actions could be measured",
            fix='use routing="turns"',
        )  # fmt: skip

    @property
    def updates(self) -> int:
        """Number of minibatches applied, equal on every rank."""
        return self._updates

    @property
    def _next_update(self) -> int:
        return self._applied  # updates are numbered like minibatches

    @property
    def weight_mode(self) -> WeightMode:
        """The weights that a backward reads; "flush" if all staleness is 0."""
        return self.queue.mode if any(self.dealt) else weight_mode(FLUSH)

    def weights_of(self) -> Mapping[tuple[int, int], RestorableStageWeights]:
        """Return the weights of the replicas of this process."""
        return {(stage, 0): worker.weights for stage, worker in self._workers.items()}

    def restart(self, updates: int, calls: int) -> None:
        """Continue with this minibatch number; minibatches are numbered like calls."""
        for worker in self._workers.values():
            worker.weights.updates = calls  # versions are counted in minibatches
            worker.restart(calls)
        if self.dispatcher is not None:
            self.dispatcher.restart(calls)
        self._updates, self.calls, self._applied = updates, calls, calls
        self._reload_options()
        self._losses.clear()
        self._pending_requests.clear()

    def report(self) -> tuple[ReplicaReport, ...]:
        """Report microbatches and staleness of every living replica; every rank must call it."""
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
        """Drop a replica in one process, as if its process had ended; for tests of failures."""
        assert isinstance(self._messenger, InMemoryMessenger), (
            "only for in-memory replicas; kill a process instead"
        )
        del self._workers[stage]
        self._messenger.lose(stage)

    def close(self) -> None:
        """Flush the pipeline unless training has failed, then close the trainer."""
        if not self._broken:
            try:
                self._settle()
            except FxpartError:
                pass  # every call that all ranks make raises the same error
        super().close()

    # -- a call ---------------------------------------------------------------------------------

    def _work_until(self, minibatch: int) -> None:
        """Work until all replicas of this process have applied a minibatch."""
        self._work(lambda: all(w.applied > minibatch for w in self._workers.values()))
        first = next(iter(self._workers.values()))
        while first.losses:
            call, loss, requests = first.losses.popleft()
            self._pending_requests.append((call, requests))
            self._applied = call + 1
            self._updates += 1
            if loss is not None:
                self._losses.append((call, self._as_loss(loss)))
        for worker in self._workers.values():
            worker.losses.clear()
        # no later ones: all ranks process these at this call
        while self._pending_requests and self._pending_requests[0][0] <= minibatch:
            numbers = [0] * len(self._ranks_of_replicas)
            for copy, number in self._pending_requests.popleft()[1]:
                numbers[self._ranks_of_replicas[copy]] = number
            self.request.store(numbers)

    def _work(self, done: Callable[[], bool]) -> None:
        """Process messages and compute what is ready, one replica after the other."""
        while not done():
            moved = False
            for worker in list(self._workers.values()):
                if worker.copy not in self._workers:
                    continue  # the replica was lost during this loop
                try:
                    moved |= self._receive(worker)
                    moved |= worker.turn()
                except AllRanksError as cause:
                    self._broken = cause.problems[0].why
                    raise
                except Exception as cause:
                    failure = StageFailure(self._ranks[worker.copy][0], worker.doing, cause)
                    self._stop_all([failure.problem(_FIX)], cause)
            if not moved and not done():
                self.events.write(self._wait_mark)
                self._messenger.wait()

    def _receive(self, worker: ReplicaWorker) -> bool:
        """Process all messages for a replica; return whether there were any."""
        found = False
        while (letter := self._messenger.take(worker.copy)) is not None:
            found = True
            message, tensors = letter
            if isinstance(message, StopOrder):
                raise AllRanksError([Problem(*each) for each in message.problems])
            if isinstance(message, BarrierRelease):
                self._barriers_released, self._lost_at_barrier = message.number, message.lost
            else:
                worker.take(message, tensors)
        return found

    def _announce(self, event: Event) -> None:
        for stage in self._workers:
            self._messenger.tell(stage, event)

    def _stop_all(self, problems: list[Problem], cause: Exception | None = None) -> NoReturn:
        """Report problems to all ranks and raise them here."""
        self._broken = problems[0].why
        self._announce(FailureReport(_to_rows(problems)))
        raise AllRanksError(problems) from cause

    def _settle(self) -> None:
        """Flush the pipeline, wait for all ranks, and replace lost replicas; for calls on the
        model.
        """
        self._check_not_failed()
        self._work_until(self.calls - 1)
        self._barriers_entered += 1
        self._announce(BarrierArrival(self._barriers_entered))
        self._work(lambda: self._barriers_released >= self._barriers_entered)
        if self._lost_at_barrier != self.lost:
            self._replace_lost(self._lost_at_barrier)
        self._settle_options()

    def _replace_lost(self, lost: tuple[int, ...]) -> None:
        """Let a living replica represent each lost one in calls that use the whole model."""
        groups = ReplicaGroupGraph.of(self.spec).groups
        ranks = list(self._ranks)
        modules = cast(dict[int, nn.Module], self._mesh_ranks[0].modules)
        successors: dict[int, int] = {}
        for group in groups:
            alive = [copy for copy in group if copy not in lost]
            successors |= {copy: alive[0] for copy in group if copy in lost}
        if isinstance(self._transport, FaultTolerantTransport):
            new_ranks = self._transport.shrink([self._ranks_of_replicas[copy] for copy in lost])
            ranks = [(new_ranks.get(rank, 0),) for rank in self._ranks_of_replicas]
            devices = {self._transport.local[0]: next(iter(self._devices.values()))}
            self._devices = devices
        for copy, successor in successors.items():
            ranks[copy] = ranks[successor]
            modules.pop(copy, None)
            if successor in modules:
                modules[copy] = modules[successor]
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
        """Make one optimizer per replica of this process, with equal groups; return the first."""

        def make() -> tuple[Optimizers, str]:
            self._groups = make_parameter_groups(given, groups, self._state.trainable())
            made = make_optimizers(self, given)
            names = " ".join(",".join(group.names) for group in self._groups)
            return made, f"{describe_groups(next(iter(made.values())))} {names}"

        self.optimizers = agree(self._transport, "the optimizer's parameter groups", make)
        return next(iter(self.optimizers.values()))

    def _compile(self) -> StageCompiler | None:
        requests: Mapping[str, object] = {"log_grad_norm": self.options.log_grad_norm}
        check_program(self.spec, self._ranks, self.options, requests)
        return super()._compile()

    def _describe(self, optimizer: Any) -> str:
        return f"{super()._describe(optimizer)} queue {self.queue.describe()}"

    def _check_not_failed(self) -> None:
        if self._broken:
            raise error(
                "FXP504", where="this process",
                why=f"an earlier failure ended the training: {self._broken}", fix=_FIX,
            )  # fmt: skip


def _to_rows(problems: list[Problem]) -> tuple[tuple[str, str, str, str], ...]:
    return tuple((p.code, p.where, p.why, p.fix) for p in problems)


def _make_error(where: str, cause: Exception) -> FxpartError:
    fix = "fix the error there; every rank has stopped this run"
    return error("FXP507", where=where, why=describe_exception(cause), fix=fix)
