"""Consistency checks of a schedule's numbers, before any other check reads them."""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.errors import Problem
from fxpart.schedule.action import Action, Schedule, StageEdge, list_group_stages
from fxpart.schedule.dependence import edge_problems


def make_unsafe_problem(where: str, why: str, fix: str = "") -> Problem:
    """Return a problem of a schedule: FXP901."""
    return Problem("FXP901", where, why, fix)


def find_shape_problems(schedule: Schedule, edges: Sequence[StageEdge]) -> list[Problem]:
    """Return problems of stages, ranks, microbatches, peers and edges out of range (FXP901)."""
    found: list[Problem] = []
    stages, ranks = schedule.stages, len(schedule.ranks)
    if stages < 1 or schedule.microbatches < 1:
        found.append(make_unsafe_problem("schedule", "The schedule has no stage or no microbatch."))
    if len(schedule.stage_rank) != stages:
        found.append(
            make_unsafe_problem(
                "stage_rank", f"There are {len(schedule.stage_rank)} entries for {stages} stages."
            )
        )
    if not all(0 <= rank < ranks for rank in schedule.stage_rank):
        found.append(
            make_unsafe_problem("stage_rank", f"The list contains a rank outside 0..{ranks - 1}.")
        )
    found += edge_problems(stages, edges)
    found += _find_replica_problems(schedule, edges)
    if found:
        return found
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            why = _explain_misplaced(schedule, rank, action)
            if why:
                found.append(make_unsafe_problem(describe_position(rank, position, action), why))
    return found


def _find_replica_problems(schedule: Schedule, edges: Sequence[StageEdge]) -> list[Problem]:
    """Check that groups of replicas are disjoint, not empty, and have equal edges."""
    found: list[Problem] = []
    group_of: dict[int, tuple[int, ...]] = {}
    for group in schedule.replicas:
        where = f"replicas {','.join(str(stage) for stage in group)}"
        if not group:
            found.append(make_unsafe_problem("replicas", "A group is empty."))
        if not all(0 <= stage < schedule.stages for stage in group):
            found.append(make_unsafe_problem(where, f"There are only {schedule.stages} stages."))
        twice = {stage for stage in group if stage in group_of}
        if twice:
            found.append(make_unsafe_problem(where, f"Stage {min(twice)} is in two groups."))
        group_of |= dict.fromkeys(group, list_group_stages(group))
    if found or not group_of:
        return found
    flags = {(e.source, e.target): e.backward for e in edges}
    for (source, target), backward in flags.items():
        sources, targets = group_of.get(source, (source,)), group_of.get(target, (target,))
        if target in sources:
            found.append(
                make_unsafe_problem(
                    f"edge {source} -> {target}", "The edge connects two replicas of one stage."
                )
            )
            continue
        missing = [
            f"{s} -> {t}" for s in sources for t in targets if flags.get((s, t)) is not backward
        ]
        if missing:
            why = f"Other replicas lack the edge: {', '.join(missing[:4])}."
            found.append(
                make_unsafe_problem(
                    f"edge {source} -> {target}",
                    why,
                    "Give all replicas of a group the same edges.",
                )
            )
    return found


def describe_position(rank: int, position: int, action: Action) -> str:
    """Return a description of an action's position."""
    return f"rank {rank}, action {position}: {action}"


def _explain_misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    if not 0 <= action.stage < schedule.stages:
        return f"There are only {schedule.stages} stages."
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"There are only {schedule.microbatches} microbatches."
    if schedule.stage_rank[action.stage] != rank:
        return f"Stage {action.stage} is on rank {schedule.stage_rank[action.stage]}."
    if action.peer is not None and not 0 <= action.peer < schedule.stages:
        return f"There is no stage {action.peer}."
    return ""
