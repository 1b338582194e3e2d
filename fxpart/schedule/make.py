"""From a schedule's name to one that may be run: built, placed, lowered, and proved safe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxpart.errors import error
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.builders import BUILDERS
from fxpart.schedule.lower import lower
from fxpart.schedule.place import place
from fxpart.schedule.verify import verify


def make(
    name: str,
    stage_rank: Sequence[int],
    microbatches: int,
    edges: Iterable[StageEdge],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
) -> Schedule:
    """The named schedule for a stage graph on its ranks, with transfers, verified.

    name: one of BUILDERS. stage_rank: the rank of each stage; several stages may share one.
    forward, backward: seconds of each stage, if known, for an order that waits less; every
    process of a run must give the same. Raises FXP109 for an unknown name, sizes below 1 and
    ranks left out, FXP901 where the edges do not form a stage graph.
    """
    if name not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise error(
            "FXP109", where=f"schedule={name!r}", why="there is none of that name",
            fix=f"choose one of {known}",
        )  # fmt: skip
    graph = tuple(edges)
    built = BUILDERS[name](len(stage_rank), microbatches, graph)
    placed = place(built, stage_rank, graph, forward=forward, backward=backward)
    lowered = lower(placed, graph, forward=forward, backward=backward)
    verify(lowered, graph)
    return lowered
