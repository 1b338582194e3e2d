"""Whether a rank has become slow: from how long each computes, step by step.

Every rank hears of every step how long each rank computed, by the way, with the row that ends a
pass (or a call's word, of a stream). So all come to the same result at the same step without a
message of their own.

What a rank takes is compared with its own past, that with what the others take of theirs (the lower
median, so that a larger batch or a busy machine is nobody's fault), and with the plan. A quarter of
the steps of a window may look as they like, so neither noise nor pauses make a rank slow.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

WINDOW = 20  # steps that are looked at
EVERY = 5  # steps from a look to the next
WARM_UP = 3  # steps that are not looked at: memory is taken, kernels are chosen
SLOWER = 1.5  # times its own past, beside the others: told
UNPLANNED = 2.5  # times the plan's seconds, beside the others: told
AGAIN = 1.2  # times its past: no longer slow
_LEAST = 0.0005  # seconds of a step that are worth a word


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow, or (over) is no longer.

    stage: its plan's. step: when this was found. seconds: of computation in a step, the median of
    the last ``steps``. before: its own, earlier. planned: the plan's, None where it is not known.
    times: how much slower it is than ``by`` says, after what the others are. others: the least and
    the most of them, in times their own past.
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
        who, now = f"rank {self.rank} (stage {self.stage})", _time(self.seconds)
        if self.over:
            return f"{who} is no longer slow at step {self.step}: {now} of computation a step"
        planned = "" if self.planned is None else f", {_time(self.planned)} by the plan"
        low, high = self.others
        return (
            f"{who} is {self.times:.1f} times slower than {self.by} at step {self.step}: {now} of "
            f"computation a step, the median of {self.steps}; {_time(self.before)} before{planned};"
            f" the other ranks take {low:.2f} to {high:.2f} times what they took"
        )


class StragglerDetector:
    """How long each rank computes in a step.

    past: by rank, the least that it computed in a step, the median of a window; empty at first.
    listeners: are told of each :class:`Straggler`, on every rank after the same step.
    """

    def __init__(
        self, ranks: Sequence[Sequence[int]], *, window: int = WINDOW, warns: bool = False
    ) -> None:
        """ranks: of each stage and lane. window: steps that are looked at. warns: as a listener."""
        places = list(dict.fromkeys(tuple(row) for row in ranks))
        self._stage = {rank: stage for stage, row in enumerate(places) for rank in row}
        self._rows: deque[Sequence[int]] = deque(maxlen=window)
        self._seen = 0
        self.past: dict[int, float] = {}
        self._planned: dict[int, float] = {}
        self._slow: set[int] = set()
        self.listeners: list[Callable[[Straggler], object]] = [_warn] if warns else []

    def expect(self, seconds: Mapping[int, float]) -> None:
        """What each rank is predicted to compute in a step."""
        whole = set(seconds) >= set(self._stage) and all(each > 0 for each in seconds.values())
        self._planned = dict(seconds) if whole else {}

    def note(self, step: int, busy: Sequence[int]) -> None:
        """After a step: the nanoseconds that each rank computed; 0: they are not known.

        Nothing comes of it where one process holds all ranks.
        """
        if len(busy) < 2 or len(busy) != len(self._stage) or not all(busy):
            return
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self._rows.append(busy)
        if len(self._rows) == self._rows.maxlen and self._seen % EVERY == 0:
            for found in self._look(step):
                for listener in self.listeners:
                    listener(found)

    def forget(self, listener: Callable[[Straggler], object]) -> None:
        """Tell it no more, if it was told."""
        self.listeners[:] = [each for each in self.listeners if each != listener]

    @property
    def slow(self) -> tuple[int, ...]:
        """The ranks that are slow now."""
        return tuple(sorted(self._slow))

    def seconds(self) -> dict[int, float]:
        """By rank, how long it computes in a step: the median of the window; empty at first."""
        if not self._rows:
            return {}
        return {rank: median(row[rank] for row in self._rows) / 1e9 for rank in self._stage}

    def _look(self, step: int) -> list[Straggler]:
        now = self.seconds()
        self.past = self.past or now
        past = self._beside(self.past)
        planned = self._beside(self._planned) if self._planned else {}
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
        # The best that a rank has done; what a slow one does says nothing of that.
        for rank in now.keys() - self._slow:
            self.past[rank] = min(now[rank], self.past[rank])
        return found

    def _beside(self, base: Mapping[int, float]) -> dict[int, tuple[float, float]]:
        """By rank, in times of ``base`` and of the others': what three steps of four exceed, and
        the median.
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


def _time(seconds: float) -> str:
    """As a person reads it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
