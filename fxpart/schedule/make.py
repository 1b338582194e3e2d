"""The one way to a schedule that may be run: built, placed, lowered, and proved safe."""

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
    """The schedule for a stage graph on its ranks, with transfers, verified.

    schedule: a name of SCHEDULES, or computations for these ranks, of at least so many
    microbatches: those beyond are left out. stage_rank: the rank of each stage; several stages may
    share one. forward, backward: seconds of each stage, if known, for an order that waits less;
    every process of a run must give the same. replicas: groups of stages that are copies of one
    another (:class:`Schedule`). world: how many ranks there are, those without a stage do nothing;
    by default every rank from 0 on has one. tied: the gradients of tied parameters that stages send
    to each other, which the proof includes. Raises FXP109 for an unknown name, sizes below 1, ranks
    left out and computations for other ranks, FXP901 where the edges do not form a stage graph,
    or the computations are not safe.
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
    """What :func:`make` gives, without its proof: to simulate what nobody will run."""
    graph, ranks = tuple(edges), tuple(stage_rank)
    used = sorted(set(ranks))
    if world is not None and not set(used) <= set(range(world)):
        why = f"there are only ranks 0 to {world - 1}"
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
            why=f"its stages are on ranks {given.stage_rank}, not on {ranks}",
            fix="",
        )
    given = replace(given, ranks=given.ranks + ((),) * ((world or 0) - len(given.ranks)))
    return lower(given, graph, forward=forward, backward=backward)


def truncate_schedule(schedule: Schedule, microbatches: int) -> Schedule:
    """Its first microbatches alone, in the same order: for a last batch that is smaller.

    What is left needs nothing of what is dropped, so it is as safe as the whole. Raises FXP109 for
    more microbatches than there are, and below 1.
    """
    if microbatches == schedule.microbatches:
        return schedule
    if not 1 <= microbatches <= schedule.microbatches:
        raise error(
            "FXP109",
            where=f"schedule {schedule.name}",
            why=f"it is for {schedule.microbatches} microbatches, and {microbatches} are wanted",
            fix="search a schedule for as many, or name one that is built for any number",
        )
    ranks = tuple(
        tuple(a for a in actions if a.microbatch < microbatches) for actions in schedule.ranks
    )
    return replace(schedule, microbatches=microbatches, ranks=ranks)


def _spread(schedule: Schedule, stage_rank: tuple[int, ...], world: int) -> Schedule:
    """The same lists on the ranks of a larger world."""
    lists: list[tuple[Action, ...]] = [()] * world
    for near, rank in zip(schedule.stage_rank, stage_rank, strict=True):
        lists[rank] = schedule.ranks[near]
    return replace(schedule, ranks=tuple(lists), stage_rank=stage_rank)
