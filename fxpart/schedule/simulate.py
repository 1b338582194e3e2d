"""Simulator: the time of each computation and transfer of a schedule, from costs.

The results equal the closed forms where these are exact (balanced GPipe and 1F1B). The simulator
also covers unequal stages, skip connections, parallel branches, several stages per rank, overlapped
or blocking transfers, CPU contention, and links that share a network adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from fxpart.errors import error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.contention_times import compute_contended_times
from fxpart.schedule.dependence import Dependence, get_transfer_partner
from fxpart.schedule.event_graph import Sends, build_event_graph
from fxpart.schedule.event_times import compute_earliest_times
from fxpart.schedule.events import (
    Event,
    StageUpdateEvent,
    Times,
    TransferArrival,
    is_receive,
    is_send,
)
from fxpart.schedule.host_contention import HostContention
from fxpart.schedule.in_flight import count_in_flight
from fxpart.schedule.lower import Split
from fxpart.schedule.simulation_tasks import Segment, SimulationTasks, StageCommunicationTime
from fxpart.schedule.timeline import Span, Timeline, UpdateSpan

__all__ = [
    "Segment",
    "Sends",
    "StageCommunicationTime",
    "Transfer",
    "simulate",
    "simulate_repeated_steps",
]

Transfer = Callable[[int, int, ActionKind], float]


def simulate(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Transfer | None = None,
    *,
    split: Split | None = None,
    sends: Sends = "overlapped",
    contention: HostContention | None = None,
    places: Sequence[Sequence[int]] | None = None,
    segment: Segment | None = None,
    once: Sequence[float] | None = None,
    join: bool = False,
    communication: StageCommunicationTime | None = None,
) -> Timeline:
    """Simulate one step: spans of every rank, step time, bubble, in flight. All times in seconds.

    forward, backward: per stage, for one microbatch. split: per stage the seconds of I and W if a
    backward is split; default: half of backward each. transfer(stage, peer, kind): seconds from
    stage to peer, kind SEND_F or SEND_B; None means free. Each direction between two ranks is a
    link that carries one transfer at a time, in the order of the sends. sends:

    * "overlapped": a transfer starts when its values are ready and its link is free; receives are
      posted ahead, and only the computation that needs them waits.
    * "buffered": sends return at once, but a receive blocks its rank until the data has arrived.
    * "rendezvous": both ranks block for a transfer, from when both have reached it until its end.
    * "runtime": overlapped, within the limits of fxpart's runtime over gloo on the numbers of
      pending sends and posted receives (see :mod:`fxpart.schedule.transfer_window`).
    * "shared": the runtime's ranks of one machine, with shared memory: a send blocks its rank while
      it copies; receives take no time. ``transfer`` is then the copy time of a rank without
      contention.

    contention: the contention of ranks that share hosts. Seconds of computation are then those
    while all ranks of a host compute; each computation runs at the speed that the current
    contention permits. places: by rank of the schedule, the ranks of the contention that it
    represents (its mesh ranks, which run the same actions at the same time); by default itself.
    segment(stage, peer, kind): the name of the shared medium of a link, or None; its transfers
    divide the bandwidth.

    once: by stage, seconds per step after the rank's last computation (gradient all-reduce,
    optimizer). join: all ranks meet before these, as fxpart's runtime does to agree whether the
    step has failed. communication: the communication part of ``forward``, ``backward`` and
    ``once``, which contention does not lengthen.

    A schedule without transfers is simulated as if its links carried any number of them at once.
    Raises FXP901 if the schedule cannot be run, FXP109 if the costs do not fit it.
    """
    return simulate_repeated_steps(
        schedule, edges, forward, backward, transfer, split=split, sends=sends,
        contention=contention,
        places=places, segment=segment, once=once, join=join, communication=communication,
    )  # fmt: skip


def simulate_repeated_steps(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Transfer | None,
    *,
    split: Split | None,
    sends: Sends,
    contention: HostContention | None,
    places: Sequence[Sequence[int]] | None,
    segment: Segment | None,
    once: Sequence[float] | None,
    join: bool,
    communication: StageCommunicationTime | None,
    steps: int = 1,
) -> Timeline:
    """Simulate a schedule of several steps, with equally many microbatches each, as `simulate`."""
    costs = {"forward": forward, "backward": backward, **({} if once is None else {"once": once})}
    halves = [(b / 2, b / 2) for b in backward] if split is None else list(split)
    costs |= {"split (I)": [first for first, _ in halves], "split (W)": [w for _, w in halves]}
    _check_costs(schedule, costs)
    period = schedule.microbatches // steps if steps > 1 else None
    dependence = Dependence.of(schedule, edges, period=period)
    resources, after = build_event_graph(
        schedule, dependence, sends, updates=once is not None, join=join, steps=steps
    )

    def seconds(event: Event) -> float:
        if isinstance(event, StageUpdateEvent):
            return 0.0 if once is None else once[event.stage]
        if not isinstance(event, Action) or is_receive(event):
            return 0.0
        if event.kind is ActionKind.F:
            return forward[event.stage]
        if event.kind is ActionKind.B:
            return backward[event.stage]
        if event.kind in (ActionKind.I, ActionKind.W):
            return halves[event.stage][event.kind is ActionKind.W]
        assert event.peer is not None
        return 0.0 if transfer is None else transfer(event.stage, event.peer, event.kind)

    if contention is None and segment is None:
        return _timeline(
            schedule, compute_earliest_times(resources, after, seconds), transfer is not None
        )
    places = _check_places(schedule, contention, places)
    work = SimulationTasks(
        schedule,
        seconds,
        contention,
        places,
        segment,
        copies=sends == "shared",
        communication=communication,
    )
    times = compute_contended_times(
        resources, after, work.task, work.paces, work.counters, work.lags
    )
    return _timeline(schedule, times, transfer is not None)


def _check_costs(schedule: Schedule, costs: dict[str, Sequence[float]]) -> None:
    for name, given in costs.items():
        if len(given) != schedule.stages or not all(math.isfinite(c) and c >= 0 for c in given):
            raise error(
                "FXP109",
                where=f"simulate: {name}",
                why=f"{schedule.stages} finite nonnegative values are needed, one per stage.",
                fix="",
            )


def _check_places(
    schedule: Schedule, contention: HostContention | None, places: Sequence[Sequence[int]] | None
) -> Sequence[Sequence[int]]:
    """Return the ranks of the contention for each rank; none without a contention.

    Raises FXP109 for ranks that the contention does not contain.
    """
    count = len(schedule.ranks)
    if contention is None:
        return [()] * count
    found = [(rank,) for rank in range(count)] if places is None else places
    if len(found) != count or any(
        not 0 <= r < len(contention.host) for ranks in found for r in ranks
    ):
        why = f"{len(contention.host)} ranks have a host, but the schedule needs {count}."
        raise error("FXP109", where="simulate: contention", why=why, fix="")
    if any(not 0 < factor < math.inf for curve in contention.slowdown for factor in curve):
        why = "A slowdown must be positive and finite."
        raise error("FXP109", where="simulate: contention", why=why, fix="")
    return found


def _timeline(schedule: Schedule, times: Times, with_transfers: bool) -> Timeline:
    spans: list[Span] = []
    updates: list[UpdateSpan] = []
    for event, (start, end) in times.items():
        if isinstance(event, StageUpdateEvent):
            rank = schedule.stage_rank[event.stage]
            updates.append(UpdateSpan(rank, event.stage, event.step, start, end))
        if not isinstance(event, Action):
            continue
        rank = schedule.stage_rank[event.stage]
        if event.kind.is_compute:
            spans.append(Span(rank, "compute", event, start, end))
        elif with_transfers and is_send(event):
            other = get_transfer_partner(event)
            spans.append(Span(rank, "send", event, start, end))
            there = times.get(TransferArrival(event), (start, end))[1]
            spans.append(Span(schedule.stage_rank[other.stage], "receive", other, start, there))
    spans.sort(key=lambda s: (s.rank, s.track, s.start, s.end, s.action.stage, s.action.microbatch))
    updates.sort(key=lambda u: (u.rank, u.start, u.stage))
    ranks = len(schedule.ranks)
    busy = [0.0] * ranks
    for span in spans:
        if span.track == "compute":
            busy[span.rank] += span.end - span.start
    for update in updates:
        busy[update.rank] += update.end - update.start
    step = max((end for _, end in times.values()), default=0.0)
    bubble = 1 - sum(busy) / (ranks * step) if step > 0 else 0.0
    return Timeline(
        schedule.name, ranks, step, max(0.0, bubble), tuple(busy), count_in_flight(schedule),
        tuple(spans), tuple(updates),
    )  # fmt: skip
