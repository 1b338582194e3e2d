"""Callbacks of a training run: steps and events."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from fxpart.diagnostics.progress import ProgressBar
from fxpart.errors import error

_log = logging.getLogger("fxpart.runtime")

Kind = Literal["start", "evaluation", "statistics", "epoch", "fallback", "slow", "failure", "end"]


@dataclass(frozen=True)
class StepInfo:
    """One update of the parameters; equal on every rank except for times.

    step: number of updates so far, including those before a checkpoint that the run resumed from.
    epoch: completed passes over the data. loss: mean over the rows of the update's batches. lr: of
    each parameter group. grad_norm: the global norm before clipping, None if not computed
    (``log_grad_norm=True``). rows: of the global batches. seconds: since the end of the previous
    step, including data loading; on GPUs until the loss was known. rank: of this process. busy:
    seconds of computation by rank in this step, where processes on CPUs measure it, else empty.
    peak_memory: peak bytes so far, of tensors on this process's GPU or resident on the CPU. tokens:
    of the global batches, None for models without tokens. mfu: model FLOPs utilization, None where
    FLOPs or peaks are not known.
    """

    step: int
    epoch: int
    loss: float
    lr: tuple[float, ...]
    grad_norm: float | None
    rows: int
    seconds: float
    rank: int
    busy: tuple[float, ...] = ()
    peak_memory: int = 0
    tokens: int | None = None
    mfu: float | None = None

    @property
    def rows_per_second(self) -> float:
        """Rows of the global batch per second."""
        return self.rows / self.seconds if self.seconds else math.inf

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the global batch per second."""
        return None if self.tokens is None or not self.seconds else self.tokens / self.seconds

    @property
    def bubble(self) -> float | None:
        """Fraction of the step in which the ranks do not compute, 0 to 1.

        It includes transfers, the optimizer and data loading; None where ``busy`` is empty.
        """
        if not self.busy or not self.seconds:
            return None
        return min(1.0, max(0.0, 1.0 - sum(self.busy) / (len(self.busy) * self.seconds)))


@dataclass(frozen=True)
class Event:
    """An event other than a step.

    kind: "start", "evaluation" (values: loss and metrics), "statistics" (values: of gradients and
    activations by name, see :class:`~fxpart.runtime.fit_options.Statistics`), "epoch" (a pass over
    the data has ended), "fallback" (why: an asynchronous pipeline flushes after every minibatch
    from now on),
    "slow" (why: a rank has become slow, or no longer is:
    :mod:`fxpart.runtime.monitor.straggler_detector`), "failure" (error: the exception of fit) or
    "end" (why: "steps", "epochs", "data", "early stopping", or a signal). step: updates so far; at
    the start those before a checkpoint.
    """

    kind: Kind
    step: int
    epoch: int
    rank: int
    values: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    error: BaseException | None = None


class Callback:
    """Called for every step and event, on every rank; override the methods that you need.

    An exception ends :meth:`~fxpart.runtime.trainer.Trainer.fit` with FXP507 on every rank. A
    callback may make collective calls (``state_dict``) if it does so on all ranks. If it has
    ``state_dict`` and ``load_state_dict`` with plain data, checkpoints store the state of rank 0
    for all ranks.
    """

    def on_step(self, info: StepInfo) -> None:
        """Handle an update."""

    def on_event(self, event: Event) -> None:
        """Handle an event."""


class JsonLines(Callback):
    """Writes a line of JSON per step and event to a file, on rank 0."""

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        """path: overwritten when a run starts, appended to when a run resumes from a checkpoint.

        every: number of steps per line.
        """
        self._path, self._every = Path(path), every
        self._file: IO[str] | None = None

    def on_step(self, info: StepInfo) -> None:
        """Write a line with all fields."""
        if info.rank == 0 and info.step % self._every == 0:
            self._write({**asdict(info), "rows_per_second": info.rows_per_second})

    def on_event(self, event: Event) -> None:
        """Write a line with the fields that are set."""
        if event.rank != 0:
            return
        if event.kind == "start":
            self._open("a" if event.step else "w")
        record: dict[str, Any] = {"event": event.kind, "step": event.step, "epoch": event.epoch}
        record |= {"values": dict(event.values)} if event.values else {}
        record |= {"why": event.why} if event.why else {}
        record |= {"error": str(event.error)} if event.error is not None else {}
        self._write(record)
        if event.kind in ("failure", "end") and self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, mode: str) -> None:
        try:
            self._file = self._path.open(mode, encoding="utf-8")
        except OSError as cause:
            raise error(
                "FXP603", where=str(self._path), why=str(cause), fix="choose a writable path"
            ) from cause

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({k: _plain(v) for k, v in record.items()}) + "\n")
            self._file.flush()


class RunProgress(Callback):
    """Logs a run to the logger "fxpart.runtime" on rank 0, and shows it on a progress bar.

    INFO: events; DEBUG: steps. bar: None where none is shown.
    """

    def __init__(self, bar: ProgressBar | None) -> None:
        self._bar = bar

    def on_step(self, info: StepInfo) -> None:
        """Log step, loss and rate, and advance the bar."""
        if info.rank:
            return
        line = f"step {info.step}, loss {info.loss:.4g}, {info.rows_per_second:.4g} samples/s"
        _log.debug("%s", line)
        if self._bar is not None:
            self._bar.show(line, info.step)

    def on_event(self, event: Event) -> None:
        """Log the event with its values or its reason."""
        if event.rank:
            return
        shown = {} if event.kind == "statistics" else event.values
        values = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        reason = event.why or values or str(event.error or "")
        level = logging.DEBUG if event.kind in ("epoch", "statistics") else logging.INFO
        _log.log(
            level, "fit: %s at step %d, epoch %d%s", event.kind, event.step, event.epoch,
            f": {reason}" if reason else "",
        )  # fmt: skip


class EarlyStopping:
    """Stops a run when a value has not improved for some evaluations; equal on every rank."""

    def __init__(
        self,
        monitor: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        """monitor: a value of the evaluations. patience: evaluations in a row without improvement.

        min_delta: minimum improvement that counts. mode: direction of improvement. A value that is
        not finite is never an improvement.
        """
        if mode not in ("min", "max") or patience < 1:
            raise error(
                "FXP109", where=f"EarlyStopping(mode={mode!r}, patience={patience})",
                why="mode must be min or max, and patience at least 1",
                fix='use for example mode="min" and patience=3',
            )  # fmt: skip
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.worse = 0

    def stop(self, values: Mapping[str, float]) -> bool:
        """Return whether to stop after these values; FXP109 if the monitored one is missing."""
        if self.monitor not in values:
            raise error(
                "FXP109", where=f"EarlyStopping({self.monitor!r})",
                why=f"the evaluation has the values {', '.join(values) or '(none)'}",
                fix="monitor one of these values",
            )  # fmt: skip
        value = self._sign * values[self.monitor]
        if math.isfinite(value) and (self.best is None or value < self.best - self.min_delta):
            self.best, self.worse = value, 0
        else:
            self.worse += 1
        return self.over

    @property
    def over(self) -> bool:
        """Whether the last evaluation requested to stop."""
        return self.worse >= self.patience

    def describe(self) -> str:
        """Return the settings that must be equal on every rank, as text."""
        mode = "min" if self._sign > 0 else "max"
        return f"{self.monitor} patience {self.patience} min_delta {self.min_delta} {mode}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the evaluations since."""
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self.best, self.worse = state["best"], state["worse"]


AnyCallback = Callback | Callable[[StepInfo], object]


def _plain(value: Any) -> Any:
    """Convert NaN and infinity to text, as JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
