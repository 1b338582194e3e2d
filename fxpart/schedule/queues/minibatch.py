"""What the dispatcher knows of a minibatch: how far each group is with each microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_NEWEST = 0.5  # what the newest computation counts for in a copy's pace

WAITING, ORDERED, DONE = range(3)


@dataclass
class MicrobatchState:
    """A microbatch in a group. owner: the copy that does it, and keeps what it made."""

    owner: int | None = None
    forward: int = WAITING
    backward: int = WAITING


@dataclass
class Minibatch:
    """One minibatch until it is applied.

    text: what every rank must have of it. items: by group and microbatch. attempts: by group how
    often its exchange began anew. exchanging: by group whether it was ordered; gathered: the copies
    that have all gradients; squares: of their norms. losses: by microbatch, its part. given: by
    (backward, microbatch, from group, to group) the copy that was sent it. asked: by copy what its
    process asks of all.
    """

    count: int
    text: str
    groups: int
    losses: dict[int, float] = field(default_factory=dict)
    given: dict[tuple[bool, int, int, int], int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing was done."""
        self.items = [[MicrobatchState() for _ in range(self.count)] for _ in range(self.groups)]
        self.attempts = [0] * self.groups
        self.exchanging = [False] * self.groups
        self.gathered: list[set[int]] = [set() for _ in range(self.groups)]
        self.squares = [0.0] * self.groups

    def ran(self, group: int, *, backward: bool) -> bool:
        """Whether all forwards (or backwards) of a group have run."""
        return all((i.backward if backward else i.forward) == DONE for i in self.items[group])

    def loss(self) -> float | None:
        """The whole loss; None where there is none."""
        return sum(self.losses[m] for m in sorted(self.losses)) if self.losses else None

    def forget(self, group: int, copy: int, together: Iterable[int]) -> int:
        """A copy of the group is gone: what it did is to be done again; how many microbatches.

        together: the groups whose exchange is one, this among them: it begins anew.
        """
        found = 0
        for microbatch, item in enumerate(self.items[group]):
            if item.owner == copy:
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
