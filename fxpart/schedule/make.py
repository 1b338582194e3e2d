"""Make a runnable schedule: build, merge onto ranks, lower and verify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxpart.errors import error
from fxpart.schedule.action import Action, Schedule, StageEdge
from fxpart.schedule.builders.protocol import Groups
from fxpart.schedule.channels import TiedTransfer
from fxpart.schedule.lower import lower
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.verify import verify


def make(
    schedule: str | Schedule,
    stage_rank: Sequence[int],
    microbatches: int,
    edges: Iterable[StageEdge],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
    world: int | None = None,
    tied: Iterable[TiedTransfer] = (),
) -> Schedule:
    """Return the verified schedule, with transfers, for a stage graph on its ranks.

    schedule: a name of SCHEDULES, or computations for these ranks with at least this number of
    microbatches; the excess ones are dropped. stage_rank: the rank of each stage; several stages
    may share one. forward, backward: seconds of each stage, if known, for an order that waits less;
    every process of a run must pass the same values. replicas: groups of replicated stages
    (:class:`Schedule`). world: the number of ranks, where ranks without a stage are idle; by
    default every rank has a stage. tied: the gradients of tied parameters that stages send to each
    other, which the verification includes. Raises FXP109 for an unknown name, sizes below 1, ranks
    without a stage and computations for other ranks, and FXP901 if the edges are not a stage graph
    or the computations are unsafe.
    """
    made = make_unverified(
        schedule, stage_rank, microbatches, edges := tuple(edges), forward=forward,
        backward=backward, replicas=replicas, world=world,
    )  # fmt: skip
    verify(made, edges, tied=tied)
    return made


def make_unverified(
    schedule: str | Schedule,
    stage_rank: Sequence[int],
    microbatches: int,
    edges: Iterable[StageEdge],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
    world: int | None = None,
) -> Schedule:
    """Return the schedule of :func:`make` without verification, for simulation only."""
    graph, ranks = tuple(edges), tuple(stage_rank)
    used = sorted(set(ranks))
    if world is not None and not set(used) <= set(range(world)):
        why = f"There are only ranks 0 to {world - 1}."
        raise error("FXP109", where=f"stage_rank={ranks}", why=why, fix="")
    near = ranks if world is None else tuple(used.index(rank) for rank in ranks)
    if isinstance(schedule, str):
        spec = SCHEDULES.lookup(schedule, where=f"schedule={schedule!r}")
        built = spec(
            near, microbatches, graph, forward=forward, backward=backward, replicas=replicas
        )
        made = lower(built, graph, forward=forward, backward=backward)
        return made if world is None else _spread(made, ranks, world)
    given = truncate_schedule(schedule, microbatches)
    if given.stage_rank != ranks:
        raise error(
            "FXP109",
            where=f"schedule {given.name}",
            why=f"The schedule's stages are on ranks {given.stage_rank}, not on {ranks}.",
            fix="",
        )
    given = replace(given, ranks=given.ranks + ((),) * ((world or 0) - len(given.ranks)))
    return lower(given, graph, forward=forward, backward=backward)


def truncate_schedule(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the schedule of the first microbatches only, in the same order, for a smaller last
    batch.

    The remaining actions need none of the dropped ones, so the result is as safe as the original.
    Raises FXP109 for more microbatches than the schedule has, and below 1.
    """
    if microbatches == schedule.microbatches:
        return schedule
    if not 1 <= microbatches <= schedule.microbatches:
        raise error(
            "FXP109",
            where=f"schedule {schedule.name}",
            why=f"{microbatches} microbatches are needed; it has {schedule.microbatches}.",
            fix="Search a schedule for this number, or use a named schedule.",
        )
    ranks = tuple(
        tuple(a for a in actions if a.microbatch < microbatches) for actions in schedule.ranks
    )
    return replace(schedule, microbatches=microbatches, ranks=ranks)


def _spread(schedule: Schedule, stage_rank: tuple[int, ...], world: int) -> Schedule:
    """Return the same lists on the ranks of a larger world."""
    lists: list[tuple[Action, ...]] = [()] * world
    for near, rank in zip(schedule.stage_rank, stage_rank, strict=True):
        lists[rank] = schedule.ranks[near]
    return replace(schedule, ranks=tuple(lists), stage_rank=stage_rank)
