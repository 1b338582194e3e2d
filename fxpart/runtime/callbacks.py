"""What a training run tells while it goes: steps and events, to whoever wants to hear of them."""

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

_log = logging.getLogger("fxpart")

Kind = Literal["start", "evaluation", "epoch", "fallback", "slow", "failure", "end"]


@dataclass(frozen=True)
class StepInfo:
    """One update of the parameters. Numbers are equal on every rank but for the times.

    step: how many updates there have been in this run, those before a checkpoint that it went on
    from and this one included. epoch: passes over the
    data before this one. loss: mean over the rows of the update's batches. lr: of each parameter
    group. grad_norm: the global norm before clipping, None where it is not computed
    (``log_grad_norm=True``). rows: of the global batches. seconds: from the end of the last step,
    data included; on GPUs up to when the loss was known. rank: whose process this is.
    """

    step: int
    epoch: int
    loss: float
    lr: tuple[float, ...]
    grad_norm: float | None
    rows: int
    seconds: float
    rank: int

    @property
    def rows_per_second(self) -> float:
        """Rows of the global batch over seconds."""
        return self.rows / self.seconds if self.seconds else math.inf


@dataclass(frozen=True)
class Event:
    """Something beside the steps.

    kind: "start", "evaluation" (values: loss and metrics), "epoch" (one pass over the data has
    ended), "fallback" (why: an asynchronous pipeline drains after every minibatch from now on),
    "slow" (why: a rank has become slow, or is no longer:
    :mod:`fxpart.runtime.monitor.straggler_detector`), "failure" (error: why fit raises) or "end"
    (why: "steps", "epochs", "data", "early stopping", or a signal). step: updates so far; at the
    start those before a checkpoint.
    """

    kind: Kind
    step: int
    epoch: int
    rank: int
    values: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    error: BaseException | None = None


class Callback:
    """Told of every step and event, on every rank; override what is of interest.

    What raises here ends :meth:`~fxpart.runtime.trainer.Trainer.fit` with FXP507 on every rank. A
    call that every rank has to make (``state_dict``) is allowed if all of them make it. One with
    ``state_dict`` and ``load_state_dict`` of its own, of plain data, is saved in checkpoints: rank
    0's, for all.
    """

    def on_step(self, info: StepInfo) -> None:
        """After an update."""

    def on_event(self, event: Event) -> None:
        """After something else."""


class JsonLines(Callback):
    """Writes a line of JSON for each step and event to a file; rank 0 does."""

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        """path: is written anew when a run starts, and gone on with when it goes on from a
        checkpoint. every: how many steps there are to a line.
        """
        self._path, self._every = Path(path), every
        self._file: IO[str] | None = None

    def on_step(self, info: StepInfo) -> None:
        """A line with every number."""
        if info.rank == 0 and info.step % self._every == 0:
            self._write({**asdict(info), "rows_per_second": info.rows_per_second})

    def on_event(self, event: Event) -> None:
        """A line with what is known of it."""
        if event.rank != 0:
            return
        if event.kind == "start":
            self._open("a" if event.step else "w")
        told: dict[str, Any] = {"event": event.kind, "step": event.step, "epoch": event.epoch}
        told |= {"values": dict(event.values)} if event.values else {}
        told |= {"why": event.why} if event.why else {}
        told |= {"error": str(event.error)} if event.error is not None else {}
        self._write(told)
        if event.kind in ("failure", "end") and self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, mode: str) -> None:
        try:
            self._file = self._path.open(mode, encoding="utf-8")
        except OSError as cause:
            raise error(
                "FXP603", where=str(self._path), why=str(cause), fix="a path that can be written"
            ) from cause

    def _write(self, told: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({k: _plain(v) for k, v in told.items()}) + "\n")
            self._file.flush()


class RunProgress(Callback):
    """Logs a run to the logger "fxpart" on rank 0, and shows it on a progress bar.

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
        values = ", ".join(f"{name} {value:.4g}" for name, value in event.values.items())
        reason = event.why or values or str(event.error or "")
        level = logging.DEBUG if event.kind == "epoch" else logging.INFO
        _log.log(
            level, "fit: %s at step %d, epoch %d%s", event.kind, event.step, event.epoch,
            f": {reason}" if reason else "",
        )  # fmt: skip


class EarlyStopping:
    """Says when a number has not become better for a while; every rank sees the same numbers."""

    def __init__(
        self,
        monitor: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        """monitor: of an evaluation. patience: how many evaluations in a row may be no better.

        min_delta: by how much one has to be better to count. mode: what is better. A number that is
        not finite is never better.
        """
        if mode not in ("min", "max") or patience < 1:
            raise error(
                "FXP109", where=f"EarlyStopping(mode={mode!r}, patience={patience})",
                why="mode is min or max, and patience at least 1", fix="",
            )  # fmt: skip
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.worse = 0

    def stop(self, values: Mapping[str, float]) -> bool:
        """Whether to stop after an evaluation with these values; FXP109 if one is missing."""
        if self.monitor not in values:
            raise error(
                "FXP109", where=f"EarlyStopping({self.monitor!r})",
                why=f"evaluations give {', '.join(values) or 'nothing'}", fix="one of these",
            )  # fmt: skip
        value = self._sign * values[self.monitor]
        if math.isfinite(value) and (self.best is None or value < self.best - self.min_delta):
            self.best, self.worse = value, 0
        else:
            self.worse += 1
        return self.over

    @property
    def over(self) -> bool:
        """Whether the last evaluation said to stop."""
        return self.worse >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """What the next evaluations are compared with."""
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.best, self.worse = state["best"], state["worse"]


Told = Callback | Callable[[StepInfo], object]


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they are text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
