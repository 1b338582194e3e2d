"""How builders are called, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fxpart.errors import error
from fxpart.schedule.action import Schedule, StageEdge

Ranks = int | Sequence[int]  # the rank of each stage; a number: so many stages, one a rank
Groups = Sequence[Sequence[int]]  # stages that are copies of one another: see Schedule.replicas


class BuildFunction(Protocol):
    """A builder's function.

    stage_rank: the rank of each stage, or their number for one a rank. edges: the stage graph, a
    chain if not given. forward, backward: seconds of each stage, if known: they decide what a rank
    with several stages takes first, where the schedule itself leaves it open. replicas: groups of
    stages that are copies of one another; each microbatch is taken by one of them. The schedule
    has computations only. Raises FXP109 for sizes below 1, for ranks left out, and for ranks or
    replicas that the schedule is not made for.
    """

    def __call__(
        self,
        stage_rank: Ranks,
        microbatches: int,
        edges: Iterable[StageEdge] | None = None,
        *,
        forward: Sequence[float] | None = None,
        backward: Sequence[float] | None = None,
        replicas: Groups = (),
    ) -> Schedule:
        """The schedule."""
        ...


def validate_stage_rank(stage_rank: Ranks, microbatches: int) -> tuple[int, ...]:
    """The rank of each stage; raises FXP109 for sizes below 1 and ranks left out."""
    found = tuple(range(stage_rank)) if isinstance(stage_rank, int) else tuple(stage_rank)
    for what, value in (("stages", len(found)), ("microbatches", microbatches)):
        if value < 1:
            given = stage_rank if what == "stages" else value
            raise error("FXP109", where=f"{what}={given}", why="at least 1 is needed", fix="")
    if set(found) != set(range(len(set(found)))):
        raise error(
            "FXP109",
            where=f"stage_rank={found}",
            why="each stage needs a rank, and none may be left out from 0 on",
            fix="",
        )
    return found


def reject_replicas(name: str, replicas: Groups) -> None:
    """Raise FXP109 if there are replicas."""
    if replicas:
        raise error(
            "FXP109",
            where=f"schedule={name}, replicas={tuple(map(tuple, replicas))}",
            why="it is not made for stages that are copies of one another",
            fix="Choose a schedule that supports replicas: `fxpart explain schedules` lists them.",
        )


def assign_microbatches(stages: int, microbatches: int, replicas: Groups) -> list[tuple[int, ...]]:
    """By stage the microbatches that it takes; see ``Schedule.takes``."""
    groups = tuple(tuple(group) for group in replicas)
    alone = Schedule("", stages, microbatches, (), (), groups)
    return [alone.taken(stage) for stage in range(stages)]
