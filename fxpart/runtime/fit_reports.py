"""User code of a run: callbacks and their reports, whose losses are known some calls later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fxpart.errors import FxpartError
from fxpart.plan.throughput import RowFigures
from fxpart.runtime.batch.batch_iterator import call_user_function, make_user_error
from fxpart.runtime.callbacks import AnyCallback, Event, Kind, RunProgress, StepInfo
from fxpart.runtime.monitor.memory_footprint import read_peak_memory
from fxpart.runtime.training_run.run_digests import CompletedUpdate
from fxpart.runtime.transport.agreement import AllRanksError

if TYPE_CHECKING:
    from fxpart.runtime.trainer import Trainer

T = TypeVar("T")
NONE = object()  # The result of user code that is not called any more.


@dataclass(frozen=True)
class FitResult:
    """The result of a run. steps: updates; epochs: complete passes; values: of the last evaluation.

    Counts include those before a checkpoint that the run resumed from. why: "steps", "epochs",
    "data", "early stopping", or the signal that ended it, such as "SIGTERM to rank 2". saved:
    whether the last state is complete and intact on the disk; None without a run folder.
    """

    steps: int
    epochs: int
    why: str
    loss: float
    values: Mapping[str, float]
    saved: bool | None = None


@dataclass
class PendingUpdate:
    """An update of a run, until the losses of all its batches are known.

    lr: learning rate of each parameter group. weights: sum of the batches' weights. left: batches
    with unknown losses. total: sum of the known losses, by weight. busy: nanoseconds of computation
    by rank, of each batch. done: its description, once all its batches are submitted.
    """

    lr: tuple[float, ...]
    rows: int = 0
    weights: float = 0.0
    left: int = 0
    total: float = 0.0
    busy: list[tuple[int, ...]] = field(default_factory=list)
    done: CompletedUpdate | None = None


class UserCalls:
    """Calls user code; an exception on one rank is raised on every rank.

    While minibatches are in flight, an exception aborts the training some calls later. Until then
    this rank repeats its last batch, and calls no more user code.
    """

    def __init__(self, trainer: Trainer) -> None:
        """trainer: of the run."""
        self._trainer = trainer
        self._aborted = False

    def call(self, what: str, do: Callable[[], T]) -> T:
        """Return the result of user code, NONE once the training is being aborted."""
        if self._aborted and what != "the batches":
            return cast(T, NONE)
        if not self._trainer.in_flight:
            return call_user_function(self._trainer.transport, what, do)
        try:
            return do()
        except AllRanksError:
            raise
        except Exception as cause:
            if isinstance(cause, FxpartError) and cause.code in ("FXP503", "FXP504"):
                raise
            self._trainer.pipeline.abort(make_user_error(what, cause))
            self._aborted = True
            return cast(T, NONE)


class RunReports:
    """Reports updates and events of a run to its callbacks and its log."""

    def __init__(
        self, trainer: Trainer, callbacks: Sequence[AnyCallback], calls: UserCalls
    ) -> None:
        """calls: calls the callbacks."""
        self._trainer, self._callbacks, self._call = trainer, callbacks, calls.call
        self._progress = RunProgress(None)
        self._figures: RowFigures | None = None
        self._last = time.perf_counter()

    def show(self, bar: Any) -> None:
        """Show progress in a bar, or nowhere."""
        self._progress = RunProgress(bar)

    def start_clock(self) -> None:
        """Start the time of the next update."""
        self._last = time.perf_counter()

    def report_update(
        self, update: PendingUpdate, loss: float, busy: Sequence[tuple[int, ...]]
    ) -> None:
        """Log an update and pass it to the callbacks; start the time of the next one.

        busy: nanoseconds of computation by rank, of each batch.
        """
        info = self._make_info(update, loss, busy)
        self._progress.on_step(info)
        for callback in self._callbacks:
            tell: Callable[[StepInfo], object] = getattr(callback, "on_step", callback)  # type: ignore[arg-type]
            what = f"callback {_name(callback)}.on_step after step {info.step}"
            self._call(what, partial(tell, info))

    def notify(self, kind: Kind, step: int, epoch: int, **more: Any) -> None:
        """Pass an event to the callbacks."""
        event = Event(kind, step, epoch, self._trainer.rank, **more)
        self._progress.on_event(event)
        for callback in self._callbacks:
            tell = getattr(callback, "on_event", None)
            if tell is not None:
                what = f"callback {_name(callback)}.on_event({kind})"
                self._call(what, partial(tell, event))

    def report_failure(self, step: int, epoch: int, cause: BaseException) -> None:
        """Report a failure to the callbacks; attach their exceptions as notes."""
        event = Event("failure", step, epoch, self._trainer.rank, error=cause)
        self._progress.on_event(event)
        for callback in self._callbacks:
            try:
                getattr(callback, "on_event", _ignore)(event)
            except Exception as other:
                cause.add_note(f"callback {_name(callback)}.on_event(failure) raised {other!r}")

    def _make_info(
        self, update: PendingUpdate, loss: float, busy: Sequence[tuple[int, ...]]
    ) -> StepInfo:
        done, rows = update.done, update.rows
        assert done is not None, "all its batches are submitted"
        trainer, norm, now = self._trainer, self._trainer.last_grad_norm, time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._figures is None:
            given = trainer.row_figures if self._callbacks else None
            self._figures = RowFigures() if given is None else given()
        tokens, ideal = self._figures.tokens, self._figures.mfu_seconds
        known = bool(busy) and all(busy)
        return StepInfo(
            done.step, done.epoch, loss, update.lr, None if norm is None else float(norm), rows,
            seconds, trainer.rank,
            busy=tuple(sum(each) / 1e9 for each in zip(*busy, strict=True)) if known else (),
            peak_memory=read_peak_memory(trainer.local_device),
            tokens=None if tokens is None else round(tokens * rows),
            mfu=None if ideal is None or not seconds else ideal * rows / seconds,
        )  # fmt: skip


def _ignore(event: Event) -> None:
    """Ignore the event, for a callback that only handles steps."""


def _name(callback: object) -> str:
    return getattr(callback, "__name__", type(callback).__name__)
