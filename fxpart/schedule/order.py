"""Earliest times of events that stand in lanes: the engine under the simulator and the lowering.

A lane is anything that does one thing after another in a given order: a rank's computations, a
link's transfers. An event may stand in several lanes (a rendezvous holds both ranks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from fxpart.errors import error
from fxpart.schedule.action import Action


def earliest(
    lanes: Iterable[Sequence[Action]],
    after: Mapping[Action, Sequence[Action]],
    seconds: Callable[[Action], float],
) -> dict[Action, tuple[float, float]]:
    """Start and end of each event: as early as its lanes and its causes allow.

    lanes: events in order, each of which starts after the one before has ended. after: the events
    that must have ended before an event starts; those not in any lane wait for their causes
    alone. seconds: how long an event takes. Longest paths by Kahn's algorithm, linear time.
    Raises FXP901 if the orders contradict each other (some event waits for itself).
    """
    causes: dict[Action, list[Action]] = {event: list(need) for event, need in after.items()}
    for lane in lanes:
        for index, event in enumerate(lane):
            before = causes.setdefault(event, [])
            if index:
                before.append(lane[index - 1])
    waiting = {event: len(before) for event, before in causes.items()}
    effects: dict[Action, list[Action]] = {event: [] for event in causes}
    for event, before in causes.items():
        for cause in before:
            # A cause that never happens leaves its effect waiting, which is reported below.
            effects.setdefault(cause, []).append(event)
    ready = deque(event for event, count in waiting.items() if count == 0)
    times: dict[Action, tuple[float, float]] = {}
    while ready:
        event = ready.popleft()
        start = max((times[cause][1] for cause in causes[event]), default=0.0)
        times[event] = (start, start + seconds(event))
        for effect in effects[event]:
            waiting[effect] -= 1
            if waiting[effect] == 0:
                ready.append(effect)
    stuck = [event for event in causes if event not in times]
    if stuck:
        raise error(
            "FXP901",
            where=", ".join(str(event) for event in stuck[:6]),
            why=f"{len(stuck)} actions wait for each other, or for actions that are not there",
            fix="check the order of the actions on each rank",
        )
    return times
