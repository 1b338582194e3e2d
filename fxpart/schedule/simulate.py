"""The simulator: when each computation and transfer of a schedule happens, from costs.

Exact where the closed forms are (balanced GPipe and 1F1B), and right where they are not: unequal
stages, skips, parallel branches, several stages on a rank, transfers that overlap or block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from fxpart.errors import error
from fxpart.schedule.action import Action, Kind, Schedule, StageEdge
from fxpart.schedule.crowd import Crowd
from fxpart.schedule.dependence import Dependence, partner, sending
from fxpart.schedule.flight import in_flight
from fxpart.schedule.order import earliest
from fxpart.schedule.timeline import Span, Timeline

Transfer = Callable[[int, int, Kind], float]
Sends = Literal["overlapped", "buffered", "rendezvous"]
Times = dict[Action, tuple[float, float]]


def simulate(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Transfer | None = None,
    *,
    sends: Sends = "overlapped",
    crowd: Crowd | None = None,
) -> Timeline:
    """The schedule in time: spans of every rank, step time, bubble, in flight. All in seconds.

    forward, backward: per stage, for one microbatch (a split backward counts half for I, half for
    W). transfer(stage, peer, kind): seconds from stage to peer, kind SEND_F or SEND_B; None means
    free. Each direction between two ranks is a link that carries one transfer at a time, in the
    order of the sends. sends:

    * "overlapped": a transfer starts when its values are there and its link is free; receives
      are posted ahead, and only the computation that needs them waits.
    * "buffered": sends return at once, but a receive holds its rank until the data is there.
    * "rendezvous": both ranks stop for a transfer, from when both have come to it until its end.

    crowd: ranks that share hosts; the seconds given are then for all of a host's ranks computing.

    A schedule without transfers is taken as if its links carried any number of them at once.
    Raises FXP901 if the schedule cannot be run, FXP109 if the costs do not fit it.
    """
    _check_costs(schedule, forward, backward)
    dependence = Dependence.of(schedule, edges)
    lowered = schedule.is_lowered

    def seconds(action: Action) -> float:
        if action.kind is Kind.F:
            return forward[action.stage]
        if action.kind is Kind.B:
            return backward[action.stage]
        if action.kind in (Kind.I, Kind.W):
            return backward[action.stage] / 2
        if action.kind in (Kind.RECV_F, Kind.RECV_B) or transfer is None:
            return 0.0
        assert action.peer is not None
        return transfer(action.stage, action.peer, action.kind)

    after = _causes(schedule, dependence, lowered)
    lanes = _lanes(schedule, sends)
    if lowered:
        for send, before in _issued(schedule, sends):
            after[send] = before
    if sends == "buffered":
        for actions in schedule.ranks:
            after |= {a.plain: [partner(a.plain)] for a in actions if _receives(a)}
    times = earliest(lanes, after, seconds)
    return _timeline(schedule, times, transfer is not None)


def _check_costs(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> None:
    for name, costs in (("forward", forward), ("backward", backward)):
        if len(costs) != schedule.stages or not all(math.isfinite(c) and c >= 0 for c in costs):
            raise error(
                "FXP109",
                where=f"simulate: {name}",
                why=f"{schedule.stages} finite seconds, none negative, are needed, one per stage",
                fix="",
            )


def _receives(action: Action) -> bool:
    return action.kind in (Kind.RECV_F, Kind.RECV_B)


def _causes(
    schedule: Schedule, dependence: Dependence, lowered: bool
) -> dict[Action, list[Action]]:
    """What each computation waits for; a transfer is known by its send."""
    after: dict[Action, list[Action]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind.is_compute:
                needs = dependence.requires(action)
                after[action.plain] = [n if n.kind.is_compute else sending(n) for n in needs]
                if not lowered:
                    for send, _ in dependence.transfers(action):
                        after[send] = [action.plain]
    return after


def _lanes(schedule: Schedule, sends: Sends) -> list[list[Action]]:
    """What happens one after another: on each rank, and on each link in each direction."""
    lanes: list[list[Action]] = []
    links: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.ranks):
        lane: list[Action] = []
        for action in (a.plain for a in actions):
            if action.kind.is_compute:
                lane.append(action)
            elif sends == "rendezvous":
                lane.append(sending(action))
            elif not _receives(action):
                assert action.peer is not None
                links.setdefault((rank, schedule.stage_rank[action.peer]), []).append(action)
            elif sends == "buffered":
                lane.append(action)
        lanes.append(lane)
    return lanes + list(links.values())


def _issued(schedule: Schedule, sends: Sends) -> list[tuple[Action, list[Action]]]:
    """For each send what its rank does last before it: a send is not issued earlier."""
    found: list[tuple[Action, list[Action]]] = []
    for actions in schedule.ranks:
        last: list[Action] = []
        for action in (a.plain for a in actions):
            if action.kind.is_compute or (sends == "buffered" and _receives(action)):
                last = [action]
            elif not _receives(action):
                found.append((action, last))
    return found


def _timeline(schedule: Schedule, times: Times, with_transfers: bool) -> Timeline:
    spans: list[Span] = []
    for action, (start, end) in times.items():
        rank = schedule.stage_rank[action.stage]
        if action.kind.is_compute:
            spans.append(Span(rank, "compute", action, start, end))
        elif with_transfers and not _receives(action):
            other = partner(action)
            spans.append(Span(rank, "send", action, start, end))
            spans.append(Span(schedule.stage_rank[other.stage], "receive", other, start, end))
    spans.sort(key=lambda s: (s.rank, s.lane, s.start, s.end, s.action.stage, s.action.microbatch))
    ranks = len(schedule.ranks)
    busy = [0.0] * ranks
    for span in spans:
        if span.lane == "compute":
            busy[span.rank] += span.end - span.start
    step = max((end for _, end in times.values()), default=0.0)
    bubble = 1 - sum(busy) / (ranks * step) if step > 0 else 0.0
    return Timeline(
        schedule.name, ranks, step, max(0.0, bubble), tuple(busy), in_flight(schedule), tuple(spans)
    )
