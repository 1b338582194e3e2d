"""The dispatcher's state of a minibatch: the progress of each group with each microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_NEWEST = 0.5  # weight of the newest computation in the moving average of a replica's times

WAITING, ORDERED, DONE = range(3)


@dataclass
class MicrobatchState:
    """A microbatch in a group. owner: the replica that runs it and stores its results."""

    owner: int | None = None
    forward: int = WAITING
    backward: int = WAITING


@dataclass
class Minibatch:
    """One minibatch until it is applied.

    text: the batch description that must be equal on all ranks. items: by group and microbatch.
    attempts: by group, how often its gradient exchange restarted. exchanging: by group, whether the
    exchange was ordered. gathered: the replicas that have all gradients. squares: of their norms.
    losses: by microbatch. given: by (backward, microbatch, source group, target group), the replica
    that received the result. requests: by replica, the requests of its process to all ranks.
    """

    count: int
    text: str
    groups: int
    losses: dict[int, float] = field(default_factory=dict)
    given: dict[tuple[bool, int, int, int], int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Initialize the state of each group."""
        self.items = [[MicrobatchState() for _ in range(self.count)] for _ in range(self.groups)]
        self.attempts = [0] * self.groups
        self.exchanging = [False] * self.groups
        self.gathered: list[set[int]] = [set() for _ in range(self.groups)]
        self.squares = [0.0] * self.groups

    def ran(self, group: int, *, backward: bool) -> bool:
        """Return whether all forwards (or backwards) of a group have run."""
        return all((i.backward if backward else i.forward) == DONE for i in self.items[group])

    def loss(self) -> float | None:
        """Return the loss of the minibatch; None if there is none."""
        return sum(self.losses[m] for m in sorted(self.losses)) if self.losses else None

    def forget(self, group: int, replica: int, together: Iterable[int]) -> int:
        """Reset the work of a lost replica; return the number of its microbatches.

        together: the groups of one gradient exchange, this group included, which restarts.
        """
        found = 0
        for microbatch, item in enumerate(self.items[group]):
            if item.owner == replica:
                self.items[group][microbatch] = MicrobatchState()
                for key in [k for k in self.given if k[1:3] == (microbatch, group)]:
                    del self.given[key]
                found += 1
        for each in together:
            self.attempts[each] += 1
            self.exchanging[each] = False
            self.gathered[each].clear()
        return found


class ReplicaTimes:
    """Moving averages of the seconds of a forward and a backward of each replica."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._seconds: dict[tuple[int, bool], float] = {}

    def record(self, replica: int, back: bool, seconds: float) -> None:
        """Record one computation."""
        if seconds > 0:
            before = self._seconds.get((replica, back), seconds)
            self._seconds[replica, back] = before + _NEWEST * (seconds - before)

    def of(self, replica: int, trains: bool) -> float:
        """Return the seconds per microbatch; 0 if unknown."""
        kinds = (False, True) if trains else (False,)
        known = [self._seconds.get((replica, back), 0.0) for back in kinds]
        return sum(known) if all(known) else 0.0

    def leaves(
        self, mine: tuple[float, int], others: Iterable[tuple[float, int]], waiting: int
    ) -> bool:
        """Return whether the others finish all waiting microbatches before this replica finishes
        one.

        mine, others: of a replica, its seconds per microbatch and the number it has begun, which
        are assumed half done. waiting: microbatches that have not begun.
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
