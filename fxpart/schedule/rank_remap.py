"""A schedule on other ranks: the same lists, given to whoever holds their stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpart.errors import error
from fxpart.schedule.action import Action, Schedule


def remap_ranks(
    schedule: Schedule, stage_rank: Sequence[int], world: int | None = None
) -> Schedule:
    """The schedule with stage k on rank stage_rank[k].

    Stages that share a rank must go on sharing one, and no others. world: how many ranks there
    are, those without a stage do nothing; by default up to the largest. Raises FXP109.
    """
    ranks = tuple(stage_rank)
    moves = dict(zip(schedule.stage_rank, ranks, strict=False))
    same = len(ranks) == len(schedule.stage_rank) and all(
        moves[old] == new for old, new in zip(schedule.stage_rank, ranks, strict=True)
    )
    count = max(ranks, default=-1) + 1 if world is None else world
    if not same or len(set(moves.values())) != len(moves) or max(ranks, default=-1) >= count:
        raise error(
            "FXP109",
            where=f"schedule {schedule.name}",
            why=f"its stages are on ranks {schedule.stage_rank}, which cannot be {ranks}",
            fix="give each of its ranks one of yours",
        )
    lists: list[tuple[Action, ...]] = [()] * count
    for old, new in moves.items():
        lists[new] = schedule.ranks[old]
    return replace(schedule, ranks=tuple(lists), stage_rank=ranks)
