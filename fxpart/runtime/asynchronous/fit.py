"""Training loop of an asynchronous trainer, where a loss becomes known some calls later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fxpart.diagnostics.exception_text import describe_exception
from fxpart.errors import FxpartError, error
from fxpart.runtime.fit import FitLoop
from fxpart.runtime.fit_options import FitOptions
from fxpart.runtime.monitor.nonfinite_guard import report_nonfinite_loss
from fxpart.runtime.training_run.run_digests import CompletedUpdate
from fxpart.runtime.transport.agreement import AllRanksError, agree

if TYPE_CHECKING:
    from fxpart.runtime.asynchronous.trainer import AsyncTrainer

T = TypeVar("T")
_END = object()
_NONE = object()  # placeholder for a batch that could not be read


def check_fit_arguments(given: Mapping[str, Any]) -> FitOptions:
    """Validate the arguments of ``fit`` and return them; FXP109 for unsupported ones."""
    try:
        run = FitOptions(**given).check()
    except TypeError as cause:
        known = ", ".join(field.name for field in fields(FitOptions))
        raise error("FXP109", where="fit", why=str(cause), fix=f"choose from {known}") from cause
    if run.accumulate != 1:
        raise error(
            "FXP109", where=f"fit(accumulate={run.accumulate})",
            why="an asynchronous stage updates after each minibatch, and its backwards end in "
            "later calls", fix="use larger batches and more microbatches",
        )  # fmt: skip
    if run.statistics is not None:
        raise error(
            "FXP109", where="fit(statistics=)",
            why="each asynchronous stage updates by itself, and no rank has the gradients of one "
            "update of all stages", fix="call trainer.activation_statistics(batch) in a callback",
        )  # fmt: skip
    if run.nonfinite in ("stop", "rollback"):
        raise error(
            "FXP109", where=f"fit(nonfinite={run.nonfinite!r})",
            why="each asynchronous stage updates by itself, and skips non-finite gradients",
            fix='use "warn" or "skip"',
        )  # fmt: skip
    if run.scheduler is not None:
        raise error(
            "FXP109", where="fit(scheduler=)",
            why="each stage has its own optimizer and steps its own learning-rate scheduler",
            fix="pass program.trainer(..., scheduler=make_scheduler)",
        )  # fmt: skip
    return run


class AsyncFit(FitLoop):
    """One call of ``fit`` of an asynchronous trainer. step: minibatches submitted, one update
    each.
    """

    def __init__(self, trainer: AsyncTrainer, batches: Any, run: FitOptions) -> None:
        """See :class:`~fxpart.runtime.fit.FitLoop`."""
        super().__init__(trainer, batches, run)  # type: ignore[arg-type]
        self._async_trainer = trainer
        self._rows: dict[
            int, tuple[CompletedUpdate, tuple[float, ...]]
        ] = {}  # By call: the update and its learning rates.
        self._finite = True  # the newest loss
        self._aborted = False  # this rank has failed and the other ranks do not know it yet

    def _anneal(self) -> None:
        """Set the annealing length of a weight mode that anneals the learning rate, if it is
        unset.
        """
        if self._async_trainer.in_flight or not getattr(self._async_trainer, "needs_total", False):
            return
        total = self._planned_updates()
        agree(self.transport, "the length of the run", lambda: (True, str(total)))
        if total is not None:
            self._async_trainer.anneal_until(self._async_trainer.updates + total - self.step)

    def _loop(self) -> str:
        self._anneal()
        report_fallback = partial(self._notify, "fallback")
        self._async_trainer.listeners.append(lambda text: report_fallback(why=text))
        try:
            why = super()._loop()
            self.settle()
        finally:
            self._async_trainer.listeners.pop()
        return why

    def _iterate_epoch(self) -> Iterator[Any]:
        """Yield the batches; compare ranks at the end of the data if the pipeline is empty."""
        source = self.guarded("the batches", lambda: iter(self.position))
        while True:
            batch = _NONE
            if source is not _NONE:
                batch = self.guarded("the batches", lambda: next(source, _END))
            if batch is _END:
                break
            yield batch
        if not self._async_trainer.in_flight:
            agree(self.transport, "the batches", lambda: (True, "the data has ended"))

    def _watch_updates(self) -> None:
        """Do nothing: each stage skips updates with non-finite gradients."""

    def _update(self, group: list[Any]) -> bool:
        (batch,), rates = group, self._get_learning_rates()
        if batch is _NONE:
            call = self._async_trainer.repeat()
        else:
            call = self._async_trainer.submit(batch, local=self.run.local)
        self.step += 1
        done = self._describe_update([] if batch is _NONE else group, self._async_trainer.last_rows)
        self._rows[call] = done, rates
        self.position.used += 1
        for known, loss in self._async_trainer.pop_losses():
            self._report_step(known, float(loss))
        return True

    def _evaluate(self) -> bool:
        self.settle()
        return super()._evaluate()

    def settle(self) -> None:
        """Flush the pipeline and report all remaining steps."""
        for call, loss in self._async_trainer.finish():
            self._report_step(call, float(loss))

    def _report_step(self, call: int, loss: float) -> None:
        done, rates = self._rows.pop(call)
        finite = math.isfinite(loss)
        if self._finite and not finite and self._async_trainer.rank == 0:
            report_nonfinite_loss(done.step, loss)
        self._finite = finite
        self.loss = loss
        self._write_ledger(done, loss)
        busy = [self._async_trainer.pace.last]
        self.report_step(self.make_info((done.step, done.epoch), loss, rates, done.rows, busy))

    def guarded(self, what: str, do: Callable[[], T]) -> T:
        """Call ``do``; if it raises while minibatches are in flight, abort all ranks.

        Until the other ranks know of the failure, this rank repeats its last batch and calls no
        more user code.
        """
        if self._aborted and what != "the batches":
            return _NONE  # type: ignore[return-value]
        if not self._async_trainer.in_flight:
            return super().guarded(what, do)
        try:
            return do()
        except AllRanksError:
            raise
        except Exception as cause:
            if isinstance(cause, FxpartError) and cause.code in ("FXP503", "FXP504"):
                raise
            failure = error(
                "FXP507", where=what, why=describe_exception(cause),
                fix="fix the error there; every rank has stopped this run",
            )  # fmt: skip
            self._async_trainer.abort(cause if isinstance(cause, FxpartError) else failure)
            self._aborted = True
            return _NONE  # type: ignore[return-value]
