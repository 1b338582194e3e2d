"""Earliest times of events that stand in lanes: the engine under the simulator and the lowering.

A lane is anything that does one thing after another in a given order: a rank's computations, a
link's transfers. An event may stand in several lanes (a rendezvous holds both ranks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxpart.errors import FxpartError, error

E = TypeVar("E", bound=Hashable)


@dataclass
class EventDependencies(Generic[E]):
    """What each event waits for, and what waits for it; waiting counts what is left."""

    causes: dict[E, list[E]]
    effects: dict[E, list[E]]
    waiting: dict[E, int]

    @classmethod
    def of(
        cls, lanes: Iterable[Sequence[E]], after: Mapping[E, Sequence[E]]
    ) -> EventDependencies[E]:
        """lanes, after: as :func:`compute_earliest_times` takes them."""
        causes: dict[E, list[E]] = {event: list(need) for event, need in after.items()}
        for lane in lanes:
            for index, event in enumerate(lane):
                before = causes.setdefault(event, [])
                if index:
                    before.append(lane[index - 1])
        waiting = {event: len(before) for event, before in causes.items()}
        effects: dict[E, list[E]] = {event: [] for event in causes}
        for event, before in causes.items():
            for cause in before:
                # A cause that never happens leaves its effect waiting, which is reported then.
                effects.setdefault(cause, []).append(event)
        return cls(causes, effects, waiting)

    def first(self) -> list[E]:
        """The events that wait for nothing."""
        return [event for event, count in self.waiting.items() if count == 0]

    def freed(self, event: E) -> list[E]:
        """The events that wait for nothing more, now that this one has ended."""
        found = []
        for effect in self.effects[event]:
            self.waiting[effect] -= 1
            if self.waiting[effect] == 0:
                found.append(effect)
        return found

    def stuck(self, done: Mapping[E, object]) -> FxpartError | None:
        """FXP901 if there are events that never come."""
        left = [event for event in self.causes if event not in done]
        if not left:
            return None
        return error(
            "FXP901",
            where=", ".join(str(event) for event in left[:6]),
            why=f"{len(left)} actions wait for each other, or for actions that are not there",
            fix="check the order of the actions on each rank",
        )


def compute_earliest_times(
    lanes: Iterable[Sequence[E]],
    after: Mapping[E, Sequence[E]],
    seconds: Callable[[E], float],
) -> dict[E, tuple[float, float]]:
    """Start and end of each event: as early as its lanes and its causes allow.

    lanes: events in order, each of which starts after the one before has ended. after: the events
    that must have ended before an event starts; those not in any lane wait for their causes
    alone. seconds: how long an event takes. Longest paths by Kahn's algorithm, linear time.
    Raises FXP901 if the orders contradict each other (some event waits for itself).
    """
    graph = EventDependencies.of(lanes, after)
    ready = deque(graph.first())
    times: dict[E, tuple[float, float]] = {}
    while ready:
        event = ready.popleft()
        start = max((times[cause][1] for cause in graph.causes[event]), default=0.0)
        times[event] = (start, start + seconds(event))
        ready.extend(graph.freed(event))
    stuck = graph.stuck(times)
    if stuck is not None:
        raise stuck
    return times
