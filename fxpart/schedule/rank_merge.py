"""Merge a schedule's lists onto fewer ranks, for several stages on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxpart.errors import error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.dependence import Dependence, chain
from fxpart.schedule.lower import duration_ticks


def merge_onto_ranks(
    schedule: Schedule,
    stage_rank: Sequence[int],
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
) -> Schedule:
    """Return the computations of a schedule with stage k on rank stage_rank[k].

    schedule: computations only. Each stage keeps its own order, and so its number in flight. A rank
    runs next the computation that can start first, backward before forward, later stage before
    earlier (list scheduling, which never idles while a computation is ready). edges: the stage
    graph, a chain by default. forward, backward: seconds of each stage (default 1 and 2). Raises
    FXP109 if stage_rank does not use every rank from 0 on.
    """
    used = set(stage_rank)
    if len(stage_rank) != schedule.stages or used != set(range(len(used))):
        raise error(
            "FXP109",
            where=f"stage_rank={tuple(stage_rank)}",
            why=f"There must be {schedule.stages} entries, one per stage, "
            "that use ranks 0, 1, ... without gaps.",
            fix="",
        )
    if schedule.is_lowered:
        raise error("FXP109", where="place", why="The schedule already has transfers.", fix="")
    wanted = chain(schedule.stages) if edges is None else tuple(edges)
    moved = replace(schedule, ranks=tuple(() for _ in used), stage_rank=tuple(stage_rank))
    dependence = replace(Dependence.of(schedule, wanted), stage_rank=tuple(stage_rank))
    ticks = duration_ticks(schedule.stages, forward, backward)
    queues: list[deque[Action]] = [deque() for _ in range(schedule.stages)]
    for actions in schedule.ranks:
        for action in actions:
            queues[action.stage].append(action)
    if len(used) == schedule.stages:  # nothing to merge: every rank has one stage
        own = {rank: tuple(queue) for rank, queue in zip(stage_rank, queues, strict=True)}
        return replace(moved, ranks=tuple(own[rank] for rank in sorted(own)))
    ends: dict[Action, int] = {}
    free = [0] * len(used)
    ranks: list[list[Action]] = [[] for _ in used]
    while any(queues):
        start, action = _next(queues, dependence, ends, free)
        queues[action.stage].popleft()
        rank = stage_rank[action.stage]
        ranks[rank].append(action)
        free[rank] = ends[action.plain] = start + ticks[action.kind][action.stage]
    return replace(moved, ranks=tuple(tuple(actions) for actions in ranks))


# Priorities at equal start times: no computation depends on a W.
_LATER = {ActionKind.B: 0, ActionKind.I: 0, ActionKind.F: 1, ActionKind.W: 2}


def _next(
    queues: Sequence[deque[Action]],
    dependence: Dependence,
    ends: dict[Action, int],
    free: Sequence[int],
) -> tuple[int, Action]:
    """Return the next computation that can start first, and its start."""
    best: tuple[tuple[int, int, int], Action] | None = None
    for stage, queue in enumerate(queues):
        if not queue:
            continue
        needs = dependence.computes(queue[0].plain)
        if all(need in ends for need in needs):
            start = max((ends[need] for need in needs), default=0)
            start = max(start, free[dependence.stage_rank[stage]])
            key = (start, _LATER[queue[0].kind], -stage)
            if best is None or key < best[0]:
                best = (key, queue[0])
    if best is None:
        heads = ", ".join(str(queue[0]) for queue in queues if queue)
        raise error(
            "FXP901",
            where=heads,
            why="These computations wait for each other.",
            fix="Check the order of the computations of each stage.",
        )
    return best[0][0], best[1]
