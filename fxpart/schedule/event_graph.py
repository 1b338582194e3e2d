"""Event graph of a schedule for the simulator: resource order and dependencies."""

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
    """Return resources and dependencies for :func:`.event_times.compute_earliest_times`.

    updates, join: whether stages have an update per step, and whether a barrier of all ranks
    surrounds the updates. steps: the number of steps in the schedule, with equally many
    microbatches each.
    """
    lowered = schedule.is_lowered
    after = _list_dependencies(schedule, dependence, lowered)
    ranks, links = _list_resources(schedule, sends)
    if lowered:
        for send, before in _list_send_predecessors(schedule, sends):
            after[send] = before
    if sends == "buffered":
        for actions in schedule.ranks:
            after |= {a.plain: [get_transfer_partner(a.plain)] for a in actions if is_receive(a)}
    if updates or join:
        _add_updates(schedule, ranks, after, join, steps)
    if sends in ("runtime", "shared"):
        add_transfer_limits(schedule, dependence, ranks, after, shared=sends == "shared")
    return ranks + links, after


def _list_dependencies(schedule: Schedule, dependence: Dependence, lowered: bool) -> After:
    """Return the dependencies of each computation; a transfer is represented by its send."""
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


def _list_resources(
    schedule: Schedule, sends: Sends
) -> tuple[list[list[Event]], list[list[Event]]]:
    """Return the ordered events of each rank and of each direction of each link."""
    resources: list[list[Event]] = []
    links: dict[tuple[int, int], list[Event]] = {}
    for rank, actions in enumerate(schedule.ranks):
        resource: list[Event] = []
        for action in (a.plain for a in actions):
            if action.kind.is_compute:
                resource.append(action)
            elif sends == "rendezvous":
                resource.append(get_transfer_send(action))
            else:
                listed = sends in ("runtime", "shared")
                if listed or (sends == "buffered" and is_receive(action)):
                    resource.append(action)
                if is_send(action) and sends != "shared":
                    assert action.peer is not None
                    link = (rank, schedule.stage_rank[action.peer])
                    links.setdefault(link, []).append(action)
        resources.append(resource)
    return resources, list(links.values())


def _list_send_predecessors(schedule: Schedule, sends: Sends) -> list[tuple[Action, list[Event]]]:
    """Return for each send the last event of its rank before it; a send is not issued earlier."""
    found: list[tuple[Action, list[Event]]] = []
    for actions in schedule.ranks:
        last: list[Event] = []
        for action in (a.plain for a in actions):
            if action.kind.is_compute or (sends == "buffered" and is_receive(action)):
                last = [action]
            elif not is_receive(action):
                found.append((action, last))
    return found


def _add_updates(
    schedule: Schedule, resources: Sequence[list[Event]], after: After, join: bool, steps: int
) -> None:
    """Add each rank's updates after its last computation of each step; with join, add barriers."""
    size = schedule.microbatches // steps
    for rank, resource in enumerate(resources):
        stages = [k for k, at in enumerate(schedule.stage_rank) if at == rank]
        first: dict[int, Action] = {}
        last: dict[int, int] = {}
        for place, event in enumerate(resource):
            if isinstance(event, Action) and event.kind.is_compute:
                first.setdefault(event.microbatch // size, event)
                last[event.microbatch // size] = place
        # in descending order, so that positions stay valid
        for step in sorted(last, key=last.__getitem__, reverse=True):
            done = resource[last[step]]
            mine: list[Event] = [StageUpdateEvent(stage, step) for stage in stages]
            if join:
                after.setdefault(StepBarrier(step, False), []).append(done)
                after |= {update: [StepBarrier(step, False)] for update in mine}
                after.setdefault(StepBarrier(step, True), []).extend(mine)
                if step + 1 in first:
                    after[first[step + 1]].append(StepBarrier(step, True))
            resource[
                _find_position_after(resource, last[step]) : _find_position_after(
                    resource, last[step]
                )
            ] = mine


def _find_position_after(resource: Sequence[Event], place: int) -> int:
    """Return the position after the event and its transfers, which are not delayed."""
    place += 1
    while place < len(resource):
        event = resource[place]
        if not isinstance(event, Action) or event.kind.is_compute:
            break
        place += 1
    return place
