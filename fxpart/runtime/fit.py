"""The training loop of fit: steps, evaluations, schedulers, callbacks; in step on all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fxpart.diagnostics.progress import progress_bar
from fxpart.errors import error
from fxpart.runtime.callbacks import Kind
from fxpart.runtime.fit_options import FitOptions, Statistics, iter_once
from fxpart.runtime.fit_reports import NONE, FitResult, PendingUpdate, RunReports, UserCalls
from fxpart.runtime.monitor.nonfinite_guard import (
    MOST_SKIPPED,
    NonFiniteGuard,
    report_nonfinite_loss,
)
from fxpart.runtime.monitor.straggler_detector import Straggler
from fxpart.runtime.monitor.tensor_statistics import name_statistics
from fxpart.runtime.optimizer.facade import check_scheduler
from fxpart.runtime.training_run.data_position import DataPosition
from fxpart.runtime.training_run.run_digests import CompletedUpdate
from fxpart.runtime.training_run.run_request import describe_scheduler
from fxpart.runtime.training_run.run_session import RunSession
from fxpart.runtime.transport.agreement import AllRanksError, agree

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer


T = TypeVar("T")


class FitLoop:
    """One run of a trainer. step: updates so far; position: in the data."""

    def __init__(self, trainer: Trainer, batches: Any, run: FitOptions) -> None:
        """batches: an iterable, or a function that returns one for each epoch."""
        self.trainer, self.run, self.transport = trainer, run, trainer.transport
        self.position = DataPosition(
            batches, records=run.kept is not None, check=run.kept is None or run.kept.check
        )
        self.scheduler = run.scheduler
        self.step = 0
        self.loss = float("nan")
        self.values: dict[str, float] = {}
        self.guard: NonFiniteGuard | None = None
        self._batches = batches
        self._kept = None if run.kept is None else RunSession(self, run.kept)
        self._is_handed_over = False  # The pipeline steps the scheduler.
        self._calls = UserCalls(trainer)
        self._updates: dict[int, tuple[PendingUpdate, float]] = {}  # By call, with its weight.
        self._pending: deque[PendingUpdate] = deque()
        self._finite = True  # The newest loss.
        self._following: list[Any] = []  # The batches of the next update.
        self._reports = RunReports(trainer, run.callbacks, self._calls)

    def go(self) -> FitResult:
        """Run to the end; report a failure to the callbacks and raise it on every rank."""
        with progress_bar("fxpart fit", self.run.progress, self._planned_updates()) as bar:
            self._reports.show(bar)
            return self._run()

    def _run(self) -> FitResult:
        try:
            self.scheduler = self._make_scheduler(self.run.scheduler)
            self._hand_over_scheduler()
            if self._kept is not None:
                self._kept.begin()
            self._notify("start")
            self._reports.start_clock()
            self.trainer.pace.listeners.append(self._notify_straggler)
            self.trainer.pipeline.listeners.append(self._notify_fallback)
            self._watch_updates()
            planned = self._planned_updates()
            self.trainer.pipeline.anneal_over(None if planned is None else planned - self.step)
            why = self._loop()
            self.settle()
            if self._kept is not None:
                self._kept.end(why)
            self._notify("end", why=why)
            # Raises a callback's failure on another rank.
            agree(self.transport, "the end of fit", lambda: (True, why))
        except BaseException as cause:
            if self._kept is not None:
                self._kept.fail(cause)
            self._reports.report_failure(self.step, self.position.epoch, cause)
            raise
        finally:
            self.trainer.pipeline.cancel_prefetch()
            self.trainer.pace.forget(self._notify_straggler)
            if self._is_handed_over:
                self.trainer.pipeline.use_scheduler(None)
            if self._notify_fallback in self.trainer.pipeline.listeners:
                self.trainer.pipeline.listeners.remove(self._notify_fallback)
            if self.guard is not None:
                self.trainer.accepts_update = None
                self.trainer.log_gradient_statistics = False
            if self._kept is not None:
                self._kept.close()
        saved = None if self._kept is None else self._kept.saved
        return FitResult(self.step, self.position.epoch, why, self.loss, self.values, saved)

    def _planned_updates(self) -> int | None:
        """Return the updates of the whole run, including those before a checkpoint; None if
        unknown.
        """
        run, found = self.run, []
        if run.steps is not None:
            found.append(run.steps)
        if isinstance(self._batches, Sized) and (run.epochs or run.steps is None):
            each = -(-len(self._batches) // run.accumulate)
            found.append(each * (run.epochs or 1))
        return min(found, default=None)

    def settle(self) -> None:
        """Finish minibatches in flight and report them."""
        for call, loss in self.trainer.finish() if self.trainer.is_asynchronous else ():
            self._add_loss(call, loss)
        self._report_known()

    def _watch_updates(self) -> None:
        """Check loss and gradients before each update from now on.

        Stages that update on their own skip updates with non-finite gradients themselves.
        """
        if self.trainer.is_asynchronous:
            return
        self.guard = NonFiniteGuard(self.trainer, self.run.nonfinite)
        self.trainer.accepts_update = self.guard.accept

    def _loop(self) -> str:
        """Run all updates; return why the run ended."""
        run, position = self.run, self.position
        if self._kept is not None and self._kept.resumed:
            if run.early_stopping is not None and run.early_stopping.over:
                return "early stopping"
            if why := self._find_end():
                return why
        while True:
            groups = self._groups(self._iterate_epoch())
            ahead = run.prefetch and not self.trainer.is_asynchronous
            for group, self._following in position.pair(groups, ahead=ahead):
                if not self._update(group):
                    continue
                if run.every and self.step % run.every == 0 and self._evaluate():
                    return "early stopping"
                if self._kept is not None and (why := self._kept.stop()):
                    return why
                if self.step == run.steps:
                    return "steps"
            if not position.used:
                return "data"
            position.next_epoch()
            if run.scheduler_every == "epoch":
                self._schedule()
            if run.evaluate is not None and not run.every and self._evaluate():
                return "early stopping"
            self._notify("epoch")
            if why := self._find_end():
                return why

    def _find_end(self) -> str:
        """Return why there is no further epoch; "" if there is one."""
        run, epoch = self.run, self.position.epoch
        if run.steps is not None and self.step >= run.steps:
            return "steps"
        if run.epochs is not None and epoch >= run.epochs:
            return "epochs"
        once = (run.steps is None and run.epochs is None) or iter_once(self._batches)
        return "data" if epoch and once else ""

    def _iterate_epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch; FXP501 on every rank if one has more of them.

        A rank reports the end in the agreement that the ranks make for the next batch anyway. While
        minibatches are in flight, they detect it from each other's messages.
        """
        source = self.guarded("the batches", lambda: iter(self.position))
        while True:
            batch = NONE
            if source is not NONE:
                batch = self.guarded("the batches", lambda: next(source, _END))
            if batch is _END:
                break
            yield batch
        if not self.trainer.in_flight:
            agree(self.transport, "the batches", lambda: (True, "the data has ended"))

    def guarded(self, what: str, do: Callable[[], T]) -> T:
        """Call a user function; raise its exception on every rank."""
        return self._calls.call(what, do)

    def _data(self, given: Any) -> Iterable[Any]:
        if not callable(given) or hasattr(given, "__iter__"):
            return given  # type: ignore[no-any-return]
        made: Iterable[Any] = self.guarded("the batches", given)
        return made

    def _groups(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Yield the batches of each update; the last update of an epoch may have fewer."""
        group: list[Any] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self.run.accumulate:
                yield group
                group = []
        if group:
            yield group

    def _update(self, group: list[Any]) -> bool:
        """Update with these batches; return False if the run went back to a checkpoint instead."""
        trainer, update = self.trainer, PendingUpdate(self._get_learning_rates())
        reported = self.run.reported
        if reported is not None and (self.step + 1) % reported.every:
            reported = None
        trainer.log_gradient_statistics = reported is not None and reported.gradients
        if self.guard is not None:
            self.guard.begin_update()
        for index, batch in enumerate(group):
            for following in [*group[index + 1 :], *self._following][: self.run.prefetch]:
                trainer.prefetch(following, local=self.run.local)
            call = self._submit(batch, accumulate=index + 1 < len(group))
            self._updates[call] = update, trainer.last_weight
            update.rows += trainer.last_rows
            update.weights += trainer.last_weight
            update.left += 1
            for known, loss in trainer.pop_losses():
                self._add_loss(known, loss)
            if not trainer.is_asynchronous:
                update.busy.append(trainer.pace.last)
        if self.guard is not None and self.guard.rejected and not self._handle_rejection(group):
            return False
        self.step += 1
        read = [batch for batch in group if batch is not NONE]
        update.done = self._describe_update(read, update.rows)
        self.position.used += len(group)
        if self.run.scheduler_every == "step":
            self._schedule()
        self._pending.append(update)
        self._report_known()
        if reported is not None:
            self._report_statistics(reported, group[-1])
        return True

    def _submit(self, batch: Any, *, accumulate: bool) -> int:
        """Submit a batch, or the last one again after a failure here; return the call."""
        if batch is NONE:
            return self.trainer.pipeline.repeat()
        return self.trainer.submit(batch, accumulate=accumulate, local=self.run.local)

    def _add_loss(self, call: int, loss: torch.Tensor) -> None:
        """Add the loss of a batch to that of its update; ignore calls before the run."""
        if call not in self._updates:
            return
        update, weight = self._updates.pop(call)
        update.total += float(loss) * weight
        update.left -= 1

    def _report_known(self) -> None:
        """Report the updates whose losses are known, in order."""
        while self._pending and not self._pending[0].left:
            update = self._pending.popleft()
            assert update.done is not None, "all its batches are submitted"
            self.loss = update.total / update.weights
            if self.trainer.is_asynchronous:
                self._note_finite(update.done.step, self.loss)
            self._write_ledger(update.done, self.loss)
            busy = update.busy or [self.trainer.pace.last]
            self._reports.report_update(update, self.loss, busy)

    def _note_finite(self, step: int, loss: float) -> None:
        """Report a loss that is not finite after one that is."""
        finite = math.isfinite(loss)
        if self._finite and not finite and self.trainer.rank == 0:
            report_nonfinite_loss(step, loss)
        self._finite = finite

    def _report_statistics(self, reported: Statistics, batch: Any) -> None:
        """Notify the callbacks of the statistics of the update; batch: its last one."""
        trainer, values = self.trainer, dict[str, float]()
        if reported.gradients:
            values |= name_statistics("gradient", trainer.last_gradient_statistics)
        if reported.activations:
            found = trainer.activation_statistics(batch, local=self.run.local)
            values |= name_statistics("activation", found)
        self._notify("statistics", values=values)
        self._reports.start_clock()

    def _handle_rejection(self, group: list[Any]) -> bool:
        """Skip a rejected update (True), go back to a checkpoint (False), or stop: FXP523."""
        guard, trainer = self.guard, self.trainer
        assert guard is not None
        if guard.reaction == "skip" and guard.row < MOST_SKIPPED:
            trainer.pipeline.skip_update()
            return True
        if guard.reaction == "rollback" and self._kept is not None:
            self.position.used += len(group)
            if self._kept.roll_back():
                return False
            self.position.used -= len(group)
        failure = AllRanksError(guard.make_error(self.step + 1).problems)
        if self._kept is not None:
            trainer.calls -= len(group)  # the batches are read again when the run is resumed
            self._kept.save(wait=True)
        raise failure

    def _write_ledger(self, done: CompletedUpdate, loss: float) -> None:
        """Write a line of the ledger."""
        if self._kept is not None:
            self.guarded("the run's ledger", partial(self._kept.updated, done, loss))

    def _describe_update(self, group: list[Any], rows: int) -> CompletedUpdate:
        """Return the ledger's description of the update with these batches."""
        position, digest = self.position, "" if self._kept is None else self._kept.digest(group)
        return CompletedUpdate(self.step, position.epoch, position.used, len(group), rows, digest)

    def _evaluate(self) -> bool:
        """Evaluate, report the values, and return whether to stop."""
        run = self.run
        self.settle()
        self.values = self.trainer.evaluate(self._data(run.evaluate), run.metrics, local=run.local)
        if self._waits_for_values:
            self.scheduler.step(next(iter(self.values.values())))
        self._notify("evaluation", values=self.values)
        self._reports.start_clock()
        return run.early_stopping is not None and run.early_stopping.stop(self.values)

    def _make_scheduler(self, given: Any) -> Any:
        """Return the scheduler, or create it by the user's function of the optimizer."""
        if given is None:
            return None
        facade = self.trainer.optimizer
        made = given
        if not hasattr(given, "step"):
            made = self.guarded("the scheduler", lambda: given(facade))

        def check() -> tuple[Any, str]:
            check_scheduler(made, facade)
            plateau = isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau)
            if plateau and self.run.evaluate is None:
                raise error(
                    "FXP115", where="fit(scheduler=ReduceLROnPlateau)",
                    why="it needs the first value of each evaluation, and there is no evaluation",
                    fix="pass evaluate=, the batches to evaluate on, or step it in your own loop",
                )  # fmt: skip
            settings = describe_scheduler(made)
            return made, " ".join(f"{name} {value}" for name, value in settings.items())

        return agree(self.transport, "the scheduler", check)

    def _hand_over_scheduler(self) -> None:
        """Let stages that update on their own step a scheduler of every update."""
        options = self.trainer.pipeline.update_options
        if self.scheduler is not None and options is not None and options.scheduler is not None:
            raise error(
                "FXP109", where="fit(scheduler=)", why="the trainer has a scheduler already",
                fix="pass it to fit or to program.trainer, not to both",
            )  # fmt: skip
        stepped = self.scheduler is not None and not self._waits_for_values
        if stepped and self.run.scheduler_every == "step":
            self._is_handed_over = self.trainer.pipeline.use_scheduler(self.scheduler)

    @property
    def _waits_for_values(self) -> bool:
        """Whether the scheduler is stepped with the values of evaluations."""
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _schedule(self) -> None:
        if self.scheduler is None or self._waits_for_values or self._is_handed_over:
            return
        self.guarded("the scheduler", self.scheduler.step)

    def _get_learning_rates(self) -> tuple[float, ...]:
        groups = [] if self.trainer.optimizer is None else self.trainer.optimizer.param_groups
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def _notify(self, kind: Kind, **more: Any) -> None:
        self._reports.notify(kind, self.step, self.position.epoch, **more)

    def _notify_fallback(self, why: str) -> None:
        self._notify("fallback", why=why)

    def _notify_straggler(self, found: Straggler) -> None:
        self._notify("slow", why=str(found))


_END = object()
