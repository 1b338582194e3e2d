"""Straggler detection from the computation time of each rank in each step.

The computation times of all ranks are part of the status that the ranks exchange at the end of each
step. So all ranks reach the same result at the same step without extra messages.

A rank's time is compared with its own past, divided by the same ratio of the other ranks (the lower
median, so that a larger batch or a busy host does not count), and with the plan. A quarter of the
steps of a window may be outliers, so neither noise nor pauses make a rank slow.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

WINDOW = 20  # Steps per evaluation.
EVERY = 5  # Steps from one evaluation to the next.
WARM_UP = 3  # Ignored steps: memory is allocated, kernels are selected.
SLOWER = 1.5  # Report above this multiple of its own past, relative to the other ranks.
UNPLANNED = 2.5  # Report above this multiple of the plan's time, relative to the other ranks.
AGAIN = 1.2  # No longer slow below this multiple of its past.
_LEAST = 0.0005  # Minimum computation time per step in seconds to report.


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow, or (over) is no longer slow.

    stage: its stage in the plan. step: when it was detected. seconds: computation time per step,
    the median of the last ``steps``. before: its earlier time. planned: the plan's time, None if
    unknown. times: how much slower it is than ``by`` names, relative to the other ranks. others:
    minimum and maximum of the other ranks' times, as multiples of their own past.
    """

    rank: int
    stage: int
    step: int
    steps: int
    seconds: float
    before: float
    planned: float | None
    times: float
    others: tuple[float, float]
    by: str = "before"
    over: bool = False

    def __str__(self) -> str:
        who, now = f"rank {self.rank} (stage {self.stage})", _format_seconds(self.seconds)
        if self.over:
            return f"{who} is no longer slow at step {self.step}: {now} of computation per step"
        planned = "" if self.planned is None else f", {_format_seconds(self.planned)} by the plan"
        low, high = self.others
        return (
            f"{who} is {self.times:.1f} times slower than {self.by} at step {self.step}: {now} of "
            f"computation per step (median of {self.steps}); {_format_seconds(self.before)} before"
            f"{planned}; the other ranks take {low:.2f} to {high:.2f} times their earlier time"
        )


class StragglerDetector:
    """Detects ranks whose computation has become slow.

    last: nanoseconds of computation by rank in the last step, empty where not known. past: by rank,
    its fastest computation time per step (median of a window); empty at first.
    listeners: called with each :class:`Straggler`, on every rank after the same step.
    """

    def __init__(
        self, ranks: Sequence[Sequence[int]], *, window: int = WINDOW, warns: bool = False
    ) -> None:
        """ranks: of each stage and mesh rank. window: in steps. warns: whether to warn."""
        places = list(dict.fromkeys(tuple(row) for row in ranks))
        self._stage = {rank: stage for stage, row in enumerate(places) for rank in row}
        self._rows: deque[Sequence[int]] = deque(maxlen=window)
        self._seen = 0
        self.last: tuple[int, ...] = ()
        self.past: dict[int, float] = {}
        self._planned: dict[int, float] = {}
        self._slow: set[int] = set()
        self.listeners: list[Callable[[Straggler], object]] = [_warn] if warns else []

    def expect(self, seconds: Mapping[int, float]) -> None:
        """Set the predicted computation time per step of each rank."""
        whole = set(seconds) >= set(self._stage) and all(each > 0 for each in seconds.values())
        self._planned = dict(seconds) if whole else {}

    def note(self, step: int, busy: Sequence[int]) -> None:
        """Record a step's nanoseconds of computation of each rank; 0: unknown.

        Does nothing if one process runs all ranks.
        """
        self.last = tuple(busy) if all(busy) else ()
        if len(busy) < 2 or len(busy) != len(self._stage) or not all(busy):
            return
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self._rows.append(busy)
        if len(self._rows) == self._rows.maxlen and self._seen % EVERY == 0:
            for found in self._find_changes(step):
                for listener in self.listeners:
                    listener(found)

    def forget(self, listener: Callable[[Straggler], object]) -> None:
        """Remove a listener, if present."""
        self.listeners[:] = [each for each in self.listeners if each != listener]

    @property
    def slow(self) -> tuple[int, ...]:
        """The ranks that are slow now."""
        return tuple(sorted(self._slow))

    def seconds(self) -> dict[int, float]:
        """Return by rank the median computation time of the window; empty at first."""
        if not self._rows:
            return {}
        return {rank: median(row[rank] for row in self._rows) / 1e9 for rank in self._stage}

    def _find_changes(self, step: int) -> list[Straggler]:
        now = self.seconds()
        self.past = self.past or now
        past = self._compare_with_others(self.past)
        planned = self._compare_with_others(self._planned) if self._planned else {}
        times = {rank: seconds / self.past[rank] for rank, seconds in now.items()}
        found = []
        for rank, (least, usual) in past.items():
            others = [each for other, each in times.items() if other != rank]
            by_plan, usual_by_plan = planned.get(rank, (0.0, 0.0))
            state = Straggler(
                rank, self._stage[rank], step, len(self._rows), now[rank], self.past[rank],
                self._planned.get(rank), usual, (min(others), max(others)),
            )  # fmt: skip
            if rank in self._slow:
                if usual < AGAIN and usual_by_plan < UNPLANNED:
                    found.append(replace(state, over=True))
            elif now[rank] >= _LEAST and least > SLOWER:
                found.append(state)
            elif now[rank] >= _LEAST and by_plan > UNPLANNED:
                found.append(replace(state, times=usual_by_plan, by="the plan says"))
        self._slow ^= {each.rank for each in found}
        # The best time of a rank; times of a slow rank do not count.
        for rank in now.keys() - self._slow:
            self.past[rank] = min(now[rank], self.past[rank])
        return found

    def _compare_with_others(self, base: Mapping[int, float]) -> dict[int, tuple[float, float]]:
        """Return by rank its multiple of ``base`` relative to the other ranks.

        The first value is exceeded by three of four steps, the second is the median.
        """
        ratios: dict[int, list[float]] = {rank: [] for rank in self._stage}
        for row in self._rows:
            of = {rank: row[rank] / base[rank] for rank in self._stage}
            usual = median_low(of.values())
            for rank, each in of.items():
                ratios[rank].append(each / usual)
        return {rank: (sorted(each)[len(each) // 4], median(each)) for rank, each in ratios.items()}


def _warn(found: Straggler) -> None:
    warnings.warn(str(found), stacklevel=6)


def _format_seconds(seconds: float) -> str:
    """Format a duration."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
