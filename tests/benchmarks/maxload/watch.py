"""When to stop, and who is told how far the search is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


class MaxLoadOutOfTime(Exception):
    """The time limit is reached, or the user wants the best found so far."""


def never() -> bool:
    """The answer of one who does not ask to stop."""
    return False


@dataclass(frozen=True)
class MaxLoadWatch:
    """deadline: a ``time.monotonic()`` value. stopped: whether the user has asked to stop."""

    deadline: float
    stopped: Callable[[], bool] = field(default=never)

    def left(self) -> float:
        """Seconds until the deadline; raises :class:`MaxLoadOutOfTime` where there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0 or self.stopped():
            raise MaxLoadOutOfTime
        return left

    def part(self, share: float) -> MaxLoadWatch:
        """A watch that ends after this share of the time that is left."""
        now = time.monotonic()
        return MaxLoadWatch(now + max(0.0, self.deadline - now) * share, self.stopped)
