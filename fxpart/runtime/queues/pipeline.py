"""The pipeline of replicated stages that take microbatches from queues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from fxpart.diagnostics.rank_event import ALL, STEP
from fxpart.errors import FxpartError, Problem, error
from fxpart.program.replica_groups import ReplicaGroupGraph
from fxpart.runtime.asynchronous.stage_optimizers import record_options
from fxpart.runtime.asynchronous.stage_report import StageReport, gather_stage_reports
from fxpart.runtime.asynchronous.unflushed_pipeline import UnflushedPipeline
from fxpart.runtime.batch.batch_iterator import make_user_error
from fxpart.runtime.batch.batch_reader import MicrobatchSplit
from fxpart.runtime.engine import find_used_inputs, resolve_schedule
from fxpart.runtime.executor.instruction import StageFailure, StepInput
from fxpart.runtime.mesh.mesh_ranks import get_pipeline_ranks
from fxpart.runtime.queues.fault_tolerant_transport import FaultTolerantTransport
from fxpart.runtime.queues.messenger import InMemoryMessenger, ReplicaMessenger
from fxpart.runtime.queues.options import get_staleness_by_group
from fxpart.runtime.queues.worker import ReplicaWorker
from fxpart.runtime.transport.agreement import AllRanksError, convert_transport_errors
from fxpart.schedule.queues.dispatcher import Dispatcher
from fxpart.schedule.queues.messages import (
    BarrierArrival,
    BarrierRelease,
    Event,
    FailureReport,
    StopOrder,
)
from fxpart.schedule.weight_modes import FLUSH, WeightMode, weight_mode

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer

_FIX = "restart from the last checkpoint or saved weights"


class QueuePipeline(UnflushedPipeline):
    """Runs replicated stages from queues.

    dealt: staleness of each group. dispatcher: of this process, if it is the first.
    """

    def __init__(self, trainer: Trainer) -> None:
        """See :class:`~fxpart.runtime.pipeline.Pipeline`."""
        super().__init__(trainer)
        self._updates = self._applied = 0
        self._pending_requests: deque[tuple[int, tuple[tuple[int, int], ...]]] = deque()
        self._barriers_entered = self._barriers_released = -1
        self._lost_at_barrier: tuple[int, ...] = ()
        parts = self._parts
        self._ranks_of_replicas = [row[0] for row in parts.ranks]
        self._wait_mark = self.events.mark("messages of other ranks", "wait", peer=ALL)
        self._step_end_mark = self.events.mark(STEP, "end")
        layout = ReplicaGroupGraph.of(self.spec)
        self.dealt = get_staleness_by_group(parts.options, len(layout.groups))
        placed = resolve_schedule(
            parts.options.schedule, self.spec, get_pipeline_ranks(parts.ranks, 0),
            parts.options.microbatches, self._transport.ranks,
        )  # fmt: skip
        queues = layout.queues(placed)
        first = 0 in self._transport.local
        self.dispatcher = Dispatcher(queues, self.dealt, parts.options.warm_up) if first else None
        self._messenger: ReplicaMessenger
        if isinstance(self._transport, FaultTolerantTransport):
            self._messenger = self._transport.wire
            self._transport.wire.start(self._ranks_of_replicas, self.dispatcher)
        else:
            assert self.dispatcher is not None, "one process has all ranks"
            self._messenger = InMemoryMessenger(self.dispatcher)
        self._workers = {
            stage: ReplicaWorker(
                parts, self._optimizers, self._messenger, stage, layout, self.dealt
            )
            for stage in parts.mesh_ranks[0].modules
        }
        self.update_options = record_options(
            self._transport, self._facade, parts.options.scheduler,
            [worker.weights for worker in self._workers.values()],
        )  # fmt: skip
        self._note_weights()
        if isinstance(self._transport, FaultTolerantTransport):
            (worker,) = self._workers.values()
            self._transport.wire.serve = worker.serve

    # -- training -------------------------------------------------------------------------------

    def step(self, batch: Any, *, accumulate: bool, local: bool) -> torch.Tensor | None:
        """Submit a minibatch and return the newest loss that every rank knows.

        With staleness 0 it is the loss of this minibatch, which every replica has applied;
        otherwise that of the minibatch ``staleness`` calls before (largest of all groups).
        """
        call = self.submit(batch, accumulate=accumulate, local=local)
        known = call - self._parts.options.allowed(call)  # a rank may know later losses already
        found = None
        while self.losses and self.losses[0][0] <= known:
            found = self.losses.popleft()[1]
        return found

    def submit(self, batch: Any, *, accumulate: bool, local: bool) -> int:
        """Submit a minibatch and return the number of the call.

        FXP109 for local: any replica may compute any of its rows.
        """
        self._refuse_accumulation(accumulate)
        self._local.check_whole()
        self.require_loss()
        if local:
            raise error(
                "FXP109", where="step(local=True)",
                why="any replica may compute any microbatch, so each rank needs all rows",
                fix="pass the global batch on every rank",
            )  # fmt: skip
        call = self._parts.calls
        try:
            self._agreement.apply_user_changes()
            cut = self._feed.read(batch, self._parts.options.microbatches)
        except FxpartError as cause:
            self._stop_all(list(cause.problems))
        self.events.step = call + 1
        try:
            self._submit_options(call)
        except Exception as cause:
            self._stop_all(list(make_user_error("the scheduler", cause).problems), cause)
        text = f"call {call}: {len(cut.rows)} microbatches of {sum(cut.rows)} rows {cut.sizes[0]}"
        text += f" optimizer options {self.update_options.digest}"
        for stage, worker in self._workers.items():
            worker.begin(call, self._batch(stage, cut), text, self._parts.request.mine)
        self._trainer.last_rows = sum(cut.rows)
        self._parts.calls += 1
        self._work_until(call - self._parts.options.allowed(call))
        self.events.write(self._step_end_mark)
        return call

    def finish(self) -> None:
        """Complete all minibatches."""
        self._local.check_whole()
        self._work_until(self._parts.calls - 1)

    @property
    def in_flight(self) -> bool:
        """Return whether a minibatch has not been applied yet."""
        return self._applied < self._parts.calls

    def abort(self, cause: Exception) -> None:
        """Raise ``cause`` on every rank, in its next call."""
        found = make_user_error("the run", cause)
        self._announce(FailureReport(_to_rows(list(found.problems))))

    def repeat(self) -> int:
        """Wait for the failure after :meth:`abort`."""
        self._work_until(self._parts.calls)
        raise AssertionError("the training has ended")

    def record(self, baseline: int | None) -> NoReturn:
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
    def lag(self) -> int:
        """Number of calls after which the loss of a minibatch is known."""
        return max(self.dealt)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Most updates between a forward and its own update, per replica."""
        layout = ReplicaGroupGraph.of(self.spec)
        return tuple(self.dealt[layout.group(stage.index)] for stage in self.spec.stages)

    @property
    def weight_mode(self) -> WeightMode:
        """The weights that a backward reads; "flush" if all staleness is 0."""
        return self._parts.options.mode if any(self.dealt) else weight_mode(FLUSH)

    def restart(self, updates: int, calls: int) -> None:
        """Continue with this minibatch number; minibatches are numbered like calls."""
        for worker in self._workers.values():
            worker.weights.updates = calls  # versions are counted in minibatches
            worker.restart(calls)
        if self.dispatcher is not None:
            self.dispatcher.restart(calls)
        self._updates, self._parts.calls, self._applied = updates, calls, calls
        self.reload_options()
        self.losses.clear()
        self._pending_requests.clear()

    def report(self) -> tuple[StageReport, ...]:
        """Report microbatches and staleness of every living replica; every rank must call it."""
        self.settle()
        mine = [
            StageReport(
                stage=stage, microbatches=worker.forwards, staleness=worker.staleness,
                updates=worker.applied, copies=worker.weights.most,
            )
            for stage, worker in self._workers.items()
        ]  # fmt: skip
        with convert_transport_errors(self._transport, "sharing reports"):
            return gather_stage_reports(self._transport, mine)

    def lose(self, stage: int) -> None:
        """Drop a replica in one process, as if its process had ended; for tests of failures."""
        assert isinstance(self._messenger, InMemoryMessenger), (
            "only for in-memory replicas; kill a process instead"
        )
        del self._workers[stage]
        self._note_weights()
        self._messenger.lose(stage)

    def close(self) -> None:
        """Complete all minibatches unless training has failed."""
        if self._local.broken is None:
            try:
                self.settle()
            except FxpartError:
                pass  # every call that all ranks make raises the same error

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
                self.losses.append((call, self._as_loss(loss)))
        for worker in self._workers.values():
            worker.losses.clear()
        # no later ones: all ranks process these at this call
        while self._pending_requests and self._pending_requests[0][0] <= minibatch:
            numbers = [0] * len(self._ranks_of_replicas)
            for copy, number in self._pending_requests.popleft()[1]:
                numbers[self._ranks_of_replicas[copy]] = number
            self._parts.request.store(numbers)

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
                    self._local.broken = cause.problems[0].why
                    raise
                except KeyboardInterrupt as cause:
                    self._local.broken = type(cause).__name__
                    raise
                except Exception as cause:
                    rank = self._parts.ranks[worker.copy][0]
                    failure = StageFailure(rank, worker.doing, cause)
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
        self._local.broken = problems[0].why
        self._announce(FailureReport(_to_rows(problems)))
        raise AllRanksError(problems) from cause

    def settle(self) -> None:
        """Flush the pipeline, wait for all ranks, and replace lost replicas; for calls on the
        model.
        """
        self._local.check_whole()
        self._work_until(self._parts.calls - 1)
        self._barriers_entered += 1
        self._announce(BarrierArrival(self._barriers_entered))
        self._work(lambda: self._barriers_released >= self._barriers_entered)
        if self._lost_at_barrier != self.lost:
            self._replace_lost(self._lost_at_barrier)
        self._settle_options()

    def _replace_lost(self, lost: tuple[int, ...]) -> None:
        """Let a living replica represent each lost one in calls that use the whole model."""
        groups = ReplicaGroupGraph.of(self.spec).groups
        ranks = list(self._parts.ranks)
        modules = cast(dict[int, nn.Module], self._parts.mesh_ranks[0].modules)
        successors: dict[int, int] = {}
        for group in groups:
            alive = [copy for copy in group if copy not in lost]
            successors |= {copy: alive[0] for copy in group if copy in lost}
        if isinstance(self._transport, FaultTolerantTransport):
            new_ranks = self._transport.shrink([self._ranks_of_replicas[copy] for copy in lost])
            ranks = [(new_ranks.get(rank, 0),) for rank in self._ranks_of_replicas]
            devices = {self._transport.local[0]: next(iter(self._parts.devices.values()))}
            self._parts.devices = devices
        for copy, successor in successors.items():
            ranks[copy] = ranks[successor]
            modules.pop(copy, None)
            if successor in modules:
                modules[copy] = modules[successor]
        self.lost = lost
        self._parts.replace_ranks(tuple(ranks))
        self._optimizers.drop(lost)

    # -- inner ----------------------------------------------------------------------------------

    def _note_weights(self) -> None:
        self.weights = {(stage, 0): worker.weights for stage, worker in self._workers.items()}

    def _batch(self, stage: int, cut: MicrobatchSplit) -> StepInput:
        parts = self._parts
        rank = parts.ranks[stage][0]
        names = find_used_inputs(parts.mesh_ranks, parts.ranks, rank)
        inputs = cut.taken(names, parts.devices[rank])
        return StepInput(inputs, cut.sizes, cut.weights, parts.keys(cut))


def _to_rows(problems: list[Problem]) -> tuple[tuple[str, str, str, str], ...]:
    return tuple((p.code, p.where, p.why, p.fix) for p in problems)
