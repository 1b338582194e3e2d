"""Whether a schedule's numbers fit together, before anything else may be asked of it."""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.errors import Problem
from fxpart.schedule.action import Action, Schedule, StageEdge
from fxpart.schedule.dependence import edge_problems


def unsafe(where: str, why: str, fix: str = "") -> Problem:
    """A problem of a schedule: FXP901."""
    return Problem("FXP901", where, why, fix)


def shape_problems(schedule: Schedule, edges: Sequence[StageEdge]) -> list[Problem]:
    """Stages, ranks, microbatches, peers and edges that are out of range (FXP901)."""
    found: list[Problem] = []
    stages, ranks = schedule.stages, len(schedule.ranks)
    if stages < 1 or schedule.microbatches < 1:
        found.append(unsafe("schedule", "it has no stage or no microbatch"))
    if len(schedule.stage_rank) != stages:
        found.append(
            unsafe("stage_rank", f"{len(schedule.stage_rank)} entries for {stages} stages")
        )
    if not all(0 <= rank < ranks for rank in schedule.stage_rank):
        found.append(unsafe("stage_rank", f"it names a rank outside 0..{ranks - 1}"))
    found += edge_problems(stages, edges)
    if found:
        return found
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            why = _misplaced(schedule, rank, action)
            if why:
                found.append(unsafe(at(rank, position, action), why))
    return found


def at(rank: int, position: int, action: Action) -> str:
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
