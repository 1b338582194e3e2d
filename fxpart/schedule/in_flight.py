"""Microbatches in flight: between their forward and their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpart.schedule.action import ActionKind, Schedule


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return per stage the most microbatches between F and B (or W) at once, in rank order.

    0 on every stage of a forward-only schedule, which keeps no activations.
    """
    most = [0] * schedule.stages
    for stage, counts in _iterate_counts(schedule):
        most[stage] = max(most[stage], counts[stage])
    return tuple(most)


def activation_peak(schedule: Schedule, activation: Sequence[int]) -> tuple[int, ...]:
    """Return per rank the peak bytes of activations over all of its stages.

    activation: bytes of one microbatch on each stage. With one stage per rank the peak is in flight
    times activation; with several stages their peaks need not coincide.
    """
    most = [0] * len(schedule.ranks)
    for stage, counts in _iterate_counts(schedule):
        rank = schedule.stage_rank[stage]
        total = sum(
            counts[k] * activation[k] for k, at in enumerate(schedule.stage_rank) if at == rank
        )
        most[rank] = max(most[rank], total)
    return tuple(most)


def _iterate_counts(schedule: Schedule) -> Iterator[tuple[int, list[int]]]:
    """Yield after each F its stage and the in-flight counts of all stages (one list, updated in
    place)."""
    counts = [0] * schedule.stages
    for actions in schedule.ranks if schedule.trains else ():
        for action in actions:
            if action.kind is ActionKind.F:
                counts[action.stage] += 1
                yield action.stage, counts
            elif action.kind in (ActionKind.B, ActionKind.W):
                counts[action.stage] -= 1
