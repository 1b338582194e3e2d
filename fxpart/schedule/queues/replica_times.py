"""How fast copies are, as far as they have said, and whether one should leave work to others."""

from __future__ import annotations

from collections.abc import Iterable

_NEWEST = 0.5  # what the newest computation counts for in a copy's pace


class ReplicaTimes:
    """Seconds of a forward and a backward of each copy; the newest count most."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._seconds: dict[tuple[int, bool], float] = {}

    def heard(self, copy: int, back: bool, seconds: float) -> None:
        """It has run one."""
        if seconds > 0:
            before = self._seconds.get((copy, back), seconds)
            self._seconds[copy, back] = before + _NEWEST * (seconds - before)

    def of(self, copy: int, trains: bool) -> float:
        """Seconds of a microbatch; 0 where they are not known."""
        kinds = (False, True) if trains else (False,)
        known = [self._seconds.get((copy, back), 0.0) for back in kinds]
        return sum(known) if all(known) else 0.0

    def leaves(
        self, mine: tuple[float, int], others: Iterable[tuple[float, int]], waiting: int
    ) -> bool:
        """Whether the others will be done with all that waits before this copy could be with one.

        mine, others: of a copy its seconds of a microbatch, and how many it has begun, which are
        taken to be half done. waiting: microbatches that nobody has begun.
        """
        free = [[begun * each / 2, each] for each, begun in others]
        end = mine[0] * (1 + mine[1] / 2)
        if not end or not free or not all(each for _, each in free):
            return False
        last = 0.0
        for _ in range(waiting):
            soonest = min(free, key=lambda one: one[0] + one[1])
            soonest[0] += soonest[1]
            last = max(last, soonest[0])
            if last >= end:
                return False
        return True
