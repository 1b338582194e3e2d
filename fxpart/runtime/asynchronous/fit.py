"""A training run over a stream: losses belong to the minibatch of an earlier call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fxpart.errors import FxpartError, error
from fxpart.runtime.callbacks import StepInfo
from fxpart.runtime.fit import FitLoop, FitOptions
from fxpart.runtime.training_run.run_session import CompletedUpdate
from fxpart.runtime.transport.agreement import AllRanksError, agree

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.trainer import AsyncTrainer

T = TypeVar("T")
_END = object()
_NONE = object()  # in the place of a batch that could not be read


def check_fit_arguments(given: Mapping[str, Any]) -> FitOptions:
    """The arguments of a run; FXP109 for those that a stream cannot have, too."""
    try:
        run = FitOptions(**given).check()
    except TypeError as cause:
        known = ", ".join(field.name for field in fields(FitOptions))
        raise error("FXP109", where="fit", why=str(cause), fix=f"one of {known}") from cause
    if run.accumulate != 1:
        raise error(
            "FXP109", where=f"fit(accumulate={run.accumulate})",
            why="an asynchronous stage updates after each minibatch, whose backwards end calls "
            "later", fix="give larger batches, and more microbatches",
        )  # fmt: skip
    if run.scheduler is not None:
        raise error(
            "FXP109", where="fit(scheduler=)",
            why="each stage has an optimizer of its own, and steps its scheduler with its updates",
            fix="program.trainer(..., scheduler=a function of an optimizer)",
        )  # fmt: skip
    return run


class AsyncFit(FitLoop):
    """One run of an asynchronous trainer. step: minibatches given, each of them an update."""

    def __init__(self, trainer: AsyncTrainer, batches: Any, run: FitOptions) -> None:
        """See :class:`~fxpart.runtime.fit.FitLoop`."""
        super().__init__(trainer, batches, run)  # type: ignore[arg-type]
        self._stream = trainer
        self._rows: dict[
            int, tuple[CompletedUpdate, tuple[float, ...]]
        ] = {}  # by call, with its rates
        self._spoilt = False  # something has failed here, and the others have not heard of it

    def _planned_updates(self) -> int | None:
        """The updates of the whole run, those before a checkpoint included; None: not known."""
        run, found = self.run, []
        if run.steps is not None:
            found.append(run.steps)
        if isinstance(self._batches, Sized) and (run.epochs or run.steps is None):
            found.append(len(self._batches) * (run.epochs or 1))
        return min(found, default=None)

    def _anneal(self) -> None:
        """Give a mode that anneals the learning rate the length of the run, if it has none."""
        if self._stream.in_flight or not getattr(self._stream, "needs_total", False):
            return
        planned = self._planned_updates()
        agree(self.transport, "the length of the run", lambda: (True, str(planned)))
        if planned is not None:
            self._stream.anneal_until(self._stream.updates + planned - self.step)

    def _loop(self) -> str:
        self._anneal()
        listener = partial(self._tell, "fallback")
        self._stream.listeners.append(lambda text: listener(why=text))
        try:
            why = super()._loop()
            self.settle()
        finally:
            self._stream.listeners.pop()
        return why

    def _each(self) -> Iterator[Any]:
        """The batches; the pipeline is empty where they end, so that ranks can be compared."""
        source = self.guarded("the batches", lambda: iter(self.position))
        while True:
            batch = _NONE
            if source is not _NONE:
                batch = self.guarded("the batches", lambda: next(source, _END))
            if batch is _END:
                break
            yield batch
        if not self._stream.in_flight:
            agree(self.transport, "the batches", lambda: (True, "the data has ended"))

    def _update(self, group: list[Any]) -> None:
        (batch,), rates = group, self._rates()
        if batch is _NONE:
            call = self._stream.again()
        else:
            call = self._stream.feed(batch, local=self.run.local)
        self.step += 1
        done = self._done([] if batch is _NONE else group, self._stream.last_rows)
        self._rows[call] = done, rates
        self.position.used += 1
        for known, loss in self._stream.taken():
            self._tell_step(known, float(loss))

    def _evaluate(self) -> bool:
        self.settle()
        return super()._evaluate()

    def settle(self) -> None:
        """Drain, and tell of all steps that are left."""
        for call, loss in self._stream.finish():
            self._tell_step(call, float(loss))

    def _tell_step(self, call: int, loss: float) -> None:
        done, rates = self._rows.pop(call)
        now, norm = time.perf_counter(), self._stream.last_grad_norm
        self.loss = loss
        self._write(done, loss)
        info = StepInfo(
            done.step, done.epoch, loss, rates, None if norm is None else float(norm),
            done.rows, now - self._last, self._stream.rank,
        )  # fmt: skip
        self._last = now
        self.report_step(info)

    def guarded(self, what: str, do: Callable[[], T]) -> T:
        """What raises here while something is in flight is heard by the others as a failure.

        Until then this rank makes the same calls, with nothing in them, and no more of the user's.
        """
        if self._spoilt and what != "the batches":
            return _NONE  # type: ignore[return-value]
        if not self._stream.in_flight:
            return super().guarded(what, do)
        try:
            return do()
        except AllRanksError:
            raise
        except Exception as cause:
            if isinstance(cause, FxpartError) and cause.code in ("FXP503", "FXP504"):
                raise
            told = error(
                "FXP507", where=what, why=f"{type(cause).__name__}: {cause}",
                fix="correct it there; every rank has ended this run, and none waits",
            )  # fmt: skip
            self._stream.spoil(cause if isinstance(cause, FxpartError) else told)
            self._spoilt = True
            return _NONE  # type: ignore[return-value]
