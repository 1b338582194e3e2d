"""How far a run has come, as its folder says: looked at from outside, and never trusted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fxpart.checkpoint.run_directory import RunDir
from fxpart.files import from_json, open_regular_file

_STEP = re.compile(r"step-(\d{10})")
_TAIL = 1 << 16  # bytes
_LOOK = 1.0  # seconds


def read_checkpoint_step(run: RunDir) -> int:
    """Updates that the run's newest checkpoint has; 0 where there is none."""
    try:
        found = [_STEP.fullmatch(path.name) for path in run.checkpoints.iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for match in found if match), default=0)


def read_ledger_step(run: RunDir) -> int:
    """The farthest update among the last lines of the run's ledger; 0 where there is none."""
    steps = [line.get("step") for line in _last_lines(run.ledger) if line.get("line") == "update"]
    return max((step for step in steps if type(step) is int), default=0)


def how_it_ended(run: RunDir) -> str:
    """Why the last generation ended, in its own words ("steps", "SIGUSR1 to rank 0", "failed").

    "" where it could not say so, or where another has begun.
    """
    lines = _last_lines(run.generations)
    if not lines or lines[-1].get("line") != "ended":
        return ""
    how = lines[-1].get("how")
    return how if isinstance(how, str) else ""


def finished(run: RunDir) -> bool:
    """Whether the last generation did all that there was to do."""
    how = how_it_ended(run)
    return how in ("steps", "epochs", "data", "early stopping")


class GenerationTimer:
    """How fast a generation goes, by its ledger, looked at once a second."""

    def __init__(self, run: RunDir, farthest: int, clock: Callable[[], float] = time.monotonic):
        """It begins now. farthest: step that was done before."""
        self._run, self._before, self._clock = run, farthest, clock
        self._began = self._looked = clock()
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def look(self) -> None:
        """Called often; reads now and then."""
        now = self._clock()
        if now - self._looked < _LOOK:
            return
        self._looked, step = now, read_ledger_step(self._run)
        if step > (self._before if self._last is None else self._last[1]):
            self._last = now, step
            self._first = self._first or self._last

    @property
    def step_seconds(self) -> float:
        """Of a step; 0 where fewer than two looks have found more of them."""
        if self._first is None or self._last is None or self._last[1] == self._first[1]:
            return 0.0
        return (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])

    @property
    def start_seconds(self) -> float:
        """From the beginning to the first step more; 0 where there was none."""
        return 0.0 if self._first is None else self._first[0] - self._began


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in the last lines of a file of JSON lines; what is none is left out."""
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
            continue  # cut by the tail, or by the end of who wrote it
        if isinstance(value, dict):
            found.append(value)
    return found
