"""Earliest times of events on serial resources: the engine of the simulator and the lowering.

A resource handles one event after another in a given order: a rank's computations, or a link's
transfers. An event may use several resources (a rendezvous occupies both ranks).
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
    """Dependencies between events; ``waiting`` counts the unfinished causes of each event."""

    causes: dict[E, list[E]]
    effects: dict[E, list[E]]
    waiting: dict[E, int]

    @classmethod
    def of(
        cls, resources: Iterable[Sequence[E]], after: Mapping[E, Sequence[E]]
    ) -> EventDependencies[E]:
        """resources, after: see :func:`compute_earliest_times`."""
        causes: dict[E, list[E]] = {event: list(need) for event, need in after.items()}
        for resource in resources:
            for index, event in enumerate(resource):
                before = causes.setdefault(event, [])
                if index:
                    before.append(resource[index - 1])
        waiting = {event: len(before) for event, before in causes.items()}
        effects: dict[E, list[E]] = {event: [] for event in causes}
        for event, before in causes.items():
            for cause in before:
                # A cause that never occurs leaves its effect waiting, which is reported by `stuck`.
                effects.setdefault(cause, []).append(event)
        return cls(causes, effects, waiting)

    def first(self) -> list[E]:
        """Return the events without dependencies."""
        return [event for event, count in self.waiting.items() if count == 0]

    def freed(self, event: E) -> list[E]:
        """Return the events that become ready when this event ends."""
        found = []
        for effect in self.effects[event]:
            self.waiting[effect] -= 1
            if self.waiting[effect] == 0:
                found.append(effect)
        return found

    def stuck(self, done: Mapping[E, object]) -> FxpartError | None:
        """Return FXP901 if some events never start."""
        left = [event for event in self.causes if event not in done]
        if not left:
            return None
        return error(
            "FXP901",
            where=", ".join(str(event) for event in left[:6]),
            why=f"{len(left)} actions wait for each other or for missing actions.",
            fix="Check the order of the actions on each rank.",
        )


def compute_earliest_times(
    resources: Iterable[Sequence[E]],
    after: Mapping[E, Sequence[E]],
    seconds: Callable[[E], float],
) -> dict[E, tuple[float, float]]:
    """Return start and end of each event: as early as resources and dependencies permit.

    resources: ordered events of each resource; each starts after the previous one has ended. after:
    the events that must end before an event starts; an event without a resource waits only for
    these. seconds: the duration of an event. Longest paths by Kahn's algorithm, linear time. Raises
    FXP901 if the orders contradict each other (some event waits for itself).
    """
    graph = EventDependencies.of(resources, after)
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
