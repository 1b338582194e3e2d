"""The signature of schedule builders and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fxpart.errors import error
from fxpart.schedule.action import Schedule, StageEdge

Ranks = int | Sequence[int]  # rank of each stage, or the number of stages for one stage per rank
Groups = Sequence[Sequence[int]]  # groups of replicated stages: see Schedule.replicas


class BuildFunction(Protocol):
    """Signature of a builder function.

    stage_rank: the rank of each stage, or the number of stages for one stage per rank. edges: the
    stage graph, a chain by default. forward, backward: seconds of each stage, if known; they order
    the computations of a rank with several stages where the schedule itself does not. replicas:
    groups of replicated stages; each microbatch runs on one of them. The returned schedule has
    computations only. Raises FXP109 for sizes below 1, for ranks without a stage, and for ranks or
    replicas that the schedule does not support.
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
        """Return the schedule."""
        ...


def validate_stage_rank(stage_rank: Ranks, microbatches: int) -> tuple[int, ...]:
    """Return the rank of each stage; raise FXP109 for sizes below 1 and ranks without a stage."""
    found = tuple(range(stage_rank)) if isinstance(stage_rank, int) else tuple(stage_rank)
    for what, value in (("stages", len(found)), ("microbatches", microbatches)):
        if value < 1:
            given = stage_rank if what == "stages" else value
            raise error(
                "FXP109", where=f"{what}={given}", why="The value must be at least 1.", fix=""
            )
    if set(found) != set(range(len(set(found)))):
        raise error(
            "FXP109",
            where=f"stage_rank={found}",
            why="Each stage needs a rank, and the ranks must be 0, 1, ... without gaps.",
            fix="",
        )
    return found


def reject_replicas(name: str, replicas: Groups) -> None:
    """Raise FXP109 if there are replicas."""
    if replicas:
        raise error(
            "FXP109",
            where=f"schedule={name}, replicas={tuple(map(tuple, replicas))}",
            why="The schedule does not support replicated stages.",
            fix="Choose a schedule that supports replicas: `fxpart explain schedules` lists them.",
        )


def assign_microbatches(stages: int, microbatches: int, replicas: Groups) -> list[tuple[int, ...]]:
    """Return by stage the microbatches that it runs; see ``Schedule.runs``."""
    groups = tuple(tuple(group) for group in replicas)
    alone = Schedule("", stages, microbatches, (), (), groups)
    return [alone.list_microbatches(stage) for stage in range(stages)]
