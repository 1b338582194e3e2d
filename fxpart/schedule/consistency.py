"""Whether a schedule's numbers fit together, before anything else may be asked of it."""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.errors import Problem
from fxpart.schedule.action import Action, Schedule, StageEdge, list_group_stages
from fxpart.schedule.dependence import edge_problems


def make_unsafe_problem(where: str, why: str, fix: str = "") -> Problem:
    """A problem of a schedule: FXP901."""
    return Problem("FXP901", where, why, fix)


def find_shape_problems(schedule: Schedule, edges: Sequence[StageEdge]) -> list[Problem]:
    """Stages, ranks, microbatches, peers and edges that are out of range (FXP901)."""
    found: list[Problem] = []
    stages, ranks = schedule.stages, len(schedule.ranks)
    if stages < 1 or schedule.microbatches < 1:
        found.append(make_unsafe_problem("schedule", "it has no stage or no microbatch"))
    if len(schedule.stage_rank) != stages:
        found.append(
            make_unsafe_problem(
                "stage_rank", f"{len(schedule.stage_rank)} entries for {stages} stages"
            )
        )
    if not all(0 <= rank < ranks for rank in schedule.stage_rank):
        found.append(make_unsafe_problem("stage_rank", f"it names a rank outside 0..{ranks - 1}"))
    found += edge_problems(stages, edges)
    found += _copies(schedule, edges)
    if found:
        return found
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            why = _misplaced(schedule, rank, action)
            if why:
                found.append(make_unsafe_problem(describe_position(rank, position, action), why))
    return found


def _copies(schedule: Schedule, edges: Sequence[StageEdge]) -> list[Problem]:
    """Groups of copies are disjoint, not empty, and joined alike to the rest of the graph."""
    found: list[Problem] = []
    group_of: dict[int, tuple[int, ...]] = {}
    for group in schedule.replicas:
        where = f"replicas {','.join(str(stage) for stage in group)}"
        if not group:
            found.append(make_unsafe_problem("replicas", "a group is empty"))
        if not all(0 <= stage < schedule.stages for stage in group):
            found.append(make_unsafe_problem(where, f"there are only {schedule.stages} stages"))
        twice = {stage for stage in group if stage in group_of}
        if twice:
            found.append(make_unsafe_problem(where, f"stage {min(twice)} is in two groups"))
        group_of |= dict.fromkeys(group, list_group_stages(group))
    if found or not group_of:
        return found
    flags = {(e.source, e.target): e.backward for e in edges}
    for (source, target), backward in flags.items():
        sources, targets = group_of.get(source, (source,)), group_of.get(target, (target,))
        if target in sources:
            found.append(
                make_unsafe_problem(
                    f"edge {source} -> {target}", "it joins two copies of one stage"
                )
            )
            continue
        unlike = [
            f"{s} -> {t}" for s in sources for t in targets if flags.get((s, t)) is not backward
        ]
        if unlike:
            why = f"copies have no such edge: {', '.join(unlike[:4])}"
            found.append(
                make_unsafe_problem(f"edge {source} -> {target}", why, "join every copy alike")
            )
    return found


def describe_position(rank: int, position: int, action: Action) -> str:
    """Where an action stands, in words."""
    return f"rank {rank}, action {position}: {action}"


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    if not 0 <= action.stage < schedule.stages:
        return f"there are only {schedule.stages} stages"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"there are only {schedule.microbatches} microbatches"
    if schedule.stage_rank[action.stage] != rank:
        return f"stage {action.stage} is on rank {schedule.stage_rank[action.stage]}"
    if action.peer is not None and not 0 <= action.peer < schedule.stages:
        return f"there is no stage {action.peer}"
    return ""
