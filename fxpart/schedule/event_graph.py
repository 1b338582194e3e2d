"""What of a schedule happens one after another, and what waits for what: a simulation's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fxpart.schedule.action import Action, Schedule
from fxpart.schedule.dependence import Dependence, get_transfer_partner, get_transfer_send
from fxpart.schedule.events import Event, StageUpdateEvent, StepBarrier, is_receive, is_send
from fxpart.schedule.transfer_window import add_transfer_limits

Sends = Literal["overlapped", "buffered", "rendezvous", "runtime", "shared"]
After = dict[Event, list[Event]]


def build_event_graph(
    schedule: Schedule,
    dependence: Dependence,
    sends: Sends,
    *,
    updates: bool = False,
    join: bool = False,
    steps: int = 1,
) -> tuple[list[list[Event]], After]:
    """Lanes and waits, as :func:`fxpart.schedule.event_times.compute_earliest_times` takes them.

    updates, join: whether stages do something once a step, and all ranks meet before and after
    that. steps: of how many the schedule is, of equally many microbatches each.
    """
    lowered = schedule.is_lowered
    after = _causes(schedule, dependence, lowered)
    ranks, links = _lanes(schedule, sends)
    if lowered:
        for send, before in _issued(schedule, sends):
            after[send] = before
    if sends == "buffered":
        for actions in schedule.ranks:
            after |= {a.plain: [get_transfer_partner(a.plain)] for a in actions if is_receive(a)}
    if updates or join:
        _once_a_step(schedule, ranks, after, join, steps)
    if sends in ("runtime", "shared"):
        add_transfer_limits(schedule, dependence, ranks, after, shared=sends == "shared")
    return ranks + links, after


def _causes(schedule: Schedule, dependence: Dependence, lowered: bool) -> After:
    """What each computation waits for; a transfer is known by its send."""
    after: After = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind.is_compute:
                needs = dependence.requires(action)
                after[action.plain] = [
                    n if n.kind.is_compute else get_transfer_send(n) for n in needs
                ]
                if not lowered:
                    for send, _ in dependence.transfers(action):
                        after[send] = [action.plain]
    return after


def _lanes(schedule: Schedule, sends: Sends) -> tuple[list[list[Event]], list[list[Event]]]:
    """What happens one after another: on each rank, and on each link in each direction."""
    lanes: list[list[Event]] = []
    links: dict[tuple[int, int], list[Event]] = {}
    for rank, actions in enumerate(schedule.ranks):
        lane: list[Event] = []
        for action in (a.plain for a in actions):
            if action.kind.is_compute:
                lane.append(action)
            elif sends == "rendezvous":
                lane.append(get_transfer_send(action))
            else:
                listed = sends in ("runtime", "shared")
                if listed or (sends == "buffered" and is_receive(action)):
                    lane.append(action)
                if is_send(action) and sends != "shared":
                    assert action.peer is not None
                    link = (rank, schedule.stage_rank[action.peer])
                    links.setdefault(link, []).append(action)
        lanes.append(lane)
    return lanes, list(links.values())


def _issued(schedule: Schedule, sends: Sends) -> list[tuple[Action, list[Event]]]:
    """For each send what its rank does last before it: a send is not issued earlier."""
    found: list[tuple[Action, list[Event]]] = []
    for actions in schedule.ranks:
        last: list[Event] = []
        for action in (a.plain for a in actions):
            if action.kind.is_compute or (sends == "buffered" and is_receive(action)):
                last = [action]
            elif not is_receive(action):
                found.append((action, last))
    return found


def _once_a_step(
    schedule: Schedule, lanes: Sequence[list[Event]], after: After, join: bool, steps: int
) -> None:
    """Each rank's updates after its last computation of each step; with join, all ranks meet."""
    size = schedule.microbatches // steps
    for rank, lane in enumerate(lanes):
        stages = [k for k, at in enumerate(schedule.stage_rank) if at == rank]
        first: dict[int, Action] = {}
        last: dict[int, int] = {}
        for place, event in enumerate(lane):
            if isinstance(event, Action) and event.kind.is_compute:
                first.setdefault(event.microbatch // size, event)
                last[event.microbatch // size] = place
        for step in sorted(last, key=last.__getitem__, reverse=True):  # so that places stay right
            done = lane[last[step]]
            mine: list[Event] = [StageUpdateEvent(stage, step) for stage in stages]
            if join:
                after.setdefault(StepBarrier(step, False), []).append(done)
                after |= {update: [StepBarrier(step, False)] for update in mine}
                after.setdefault(StepBarrier(step, True), []).extend(mine)
                if step + 1 in first:
                    after[first[step + 1]].append(StepBarrier(step, True))
            lane[_behind(lane, last[step]) : _behind(lane, last[step])] = mine


def _behind(lane: Sequence[Event], place: int) -> int:
    """Behind the event at a place and the transfers that follow it: nothing holds these up."""
    place += 1
    while place < len(lane):
        event = lane[place]
        if not isinstance(event, Action) or event.kind.is_compute:
            break
        place += 1
    return place
