"""1F1B without flushes: an asynchronous pipeline in which each stage updates on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fxpart.errors import error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.builders.gpipe_1f1b import count_1f1b_in_flight, one_f_one_b
from fxpart.schedule.builders.protocol import Groups, Ranks, reject_replicas, validate_stage_rank

ASYNC = "async"


def asynchronous(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """1F1B without flushes (Narayanan et al., PipeDream, SOSP 2019).

    microbatches: the number over all steps. Stage s runs as many forwards ahead as there are stages
    on the longest path from s to the end, then alternates through all steps. It updates its weights
    after the backwards of each step, so that forwards read stale weights
    (:mod:`fxpart.schedule.versions`). The pipeline is idle only while it first fills and last
    empties: (S - 1) / (T + S - 1) of the time of T microbatches. In flight on stage s of a chain of
    S: min(T, S - s). ``asynchronous(3, 4)``::

        0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == .  B2 == .  B3 ==
        1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == .  B3 == .  .
        2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == .  .  .  .

    The order is that of 1F1B for one step with all microbatches. Raises FXP109 for several stages
    on a rank and for replicated stages.
    """
    reject_replicas(ASYNC, replicas)
    ranks = _require_one_stage_per_rank(validate_stage_rank(stage_rank, microbatches))
    built = one_f_one_b(ranks, microbatches, edges, forward=forward, backward=backward)
    return replace(built, name=ASYNC)


def list_minibatch_actions(stage: int, ahead: int, minibatch: range) -> Iterator[Action]:
    """Yield the computations of a stage from the first forward of a minibatch to before the next.

    ahead: forwards before the first backward. minibatch: its microbatches, numbered from the empty
    pipeline.
    """
    for microbatch in minibatch:
        yield Action(stage, ActionKind.F, microbatch)
        if microbatch >= ahead - 1:
            yield Action(stage, ActionKind.B, microbatch - ahead + 1)


def list_flush_actions(stage: int, ahead: int, microbatches: int) -> Iterator[Action]:
    """Yield the remaining backwards of a stage after so many microbatches."""
    for microbatch in range(max(0, microbatches - ahead + 1), microbatches):
        yield Action(stage, ActionKind.B, microbatch)


def count_async_in_flight(
    stage_rank: Ranks, microbatches: int, replicas: Groups = ()
) -> tuple[int, ...]:
    """Return by stage the most microbatches in flight, on any stage graph; raise FXP109 as the
    builder."""
    reject_replicas(ASYNC, replicas)
    return count_1f1b_in_flight(
        _require_one_stage_per_rank(validate_stage_rank(stage_rank, microbatches)), microbatches
    )


def _require_one_stage_per_rank(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Raise FXP109 unless each rank has one stage."""
    if len(set(ranks)) < len(ranks):
        raise error(
            "FXP109",
            where=f"schedule={ASYNC}, stage_rank={ranks}",
            why="One stage per rank is required: its order determines the weight versions.",
            fix=f"Use {len(ranks)} ranks, or a schedule that flushes after each step.",
        )
    return ranks
