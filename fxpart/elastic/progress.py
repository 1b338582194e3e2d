"""Progress of a run, read from its folder by another process; the content is not trusted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fxpart.checkpoint import folder
from fxpart.checkpoint.run_directory import RunDir
from fxpart.errors import FxpartError
from fxpart.files import from_json, open_regular_file

_STEP = re.compile(r"step-(\d{10})")
_TAIL = 1 << 16  # bytes
_POLL_SECONDS = 1.0  # seconds


def read_checkpoint_step(run: RunDir) -> int:
    """Return the number of updates in the run's newest checkpoint; 0 without one."""
    try:
        found = [_STEP.fullmatch(path.name) for path in run.checkpoints.iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for match in found if match), default=0)


def read_saved_step(run: RunDir) -> int | None:
    """Return the number of updates in the run's newest checkpoint that can be opened; or None."""
    try:
        return folder.newest(run.checkpoints, verify=False).manifest.step
    except FxpartError:
        return None


def read_ledger_step(run: RunDir) -> int:
    """Return the last update among the last lines of the run's ledger; 0 without one."""
    steps = [line.get("step") for line in _last_lines(run.ledger) if line.get("line") == "update"]
    return max((step for step in steps if type(step) is int), default=0)


def read_end_reason(run: RunDir) -> str:
    """Return why the last generation ended ("steps", "SIGUSR1 to rank 0", "failed").

    "" if it could not record that, or if another one has begun.
    """
    lines = _last_lines(run.generations)
    if not lines or lines[-1].get("line") != "ended":
        return ""
    how = lines[-1].get("how")
    return how if isinstance(how, str) else ""


def is_finished(run: RunDir) -> bool:
    """Return whether the last generation completed the run."""
    how = read_end_reason(run)
    return how in ("steps", "epochs", "data", "early stopping")


class GenerationTimer:
    """Step time and start time of a generation, from its ledger, read once per second."""

    def __init__(self, run: RunDir, farthest: int, clock: Callable[[], float] = time.monotonic):
        """Start the timer. farthest: last step done before."""
        self._run, self._before, self._clock = run, farthest, clock
        self._began = self._last_poll = clock()
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def poll(self) -> None:
        """Read the ledger if a second has passed; to be called often."""
        now = self._clock()
        if now - self._last_poll < _POLL_SECONDS:
            return
        self._last_poll, step = now, read_ledger_step(self._run)
        if step > (self._before if self._last is None else self._last[1]):
            self._last = now, step
            self._first = self._first or self._last

    @property
    def step_seconds(self) -> float:
        """Seconds per step; 0 until two reads have found more steps."""
        if self._first is None or self._last is None or self._last[1] == self._first[1]:
            return 0.0
        return (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])

    @property
    def start_seconds(self) -> float:
        """Seconds from the start to the first new step; 0 before it."""
        return 0.0 if self._first is None else self._first[0] - self._began


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the last lines of a file of JSON lines; skip invalid lines."""
    try:
        with open_regular_file(path) as (file, size):
            file.seek(max(0, size - _TAIL))
            raw = file.read(_TAIL)
    except OSError:
        return []
    found = []
    for line in raw.split(b"\n"):
        try:
            value = from_json(line)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            continue  # truncated at the begin or the end
        if isinstance(value, dict):
            found.append(value)
    return found
