"""What a schedule keeps in flight: microbatches between their forward and their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpart.schedule.action import ActionKind, Schedule


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage the most microbatches between F and B (or W) at once, by the order of its rank.

    0 on every stage of a forward-only schedule, which keeps nothing.
    """
    most = [0] * schedule.stages
    for stage, held in _history(schedule):
        most[stage] = max(most[stage], held[stage])
    return tuple(most)


def activation_peak(schedule: Schedule, activation: Sequence[int]) -> tuple[int, ...]:
    """Per rank the most bytes of activations held at once, over all of its stages.

    activation: bytes that a stage keeps for one microbatch, by stage. With one stage a rank this
    is in flight times activation; with several their peaks need not coincide.
    """
    most = [0] * len(schedule.ranks)
    for stage, held in _history(schedule):
        rank = schedule.stage_rank[stage]
        total = sum(
            held[k] * activation[k] for k, at in enumerate(schedule.stage_rank) if at == rank
        )
        most[rank] = max(most[rank], total)
    return tuple(most)


def _history(schedule: Schedule) -> Iterator[tuple[int, list[int]]]:
    """After each F: its stage, and how many microbatches each stage then holds (one live list)."""
    held = [0] * schedule.stages
    for actions in schedule.ranks if schedule.trains else ():
        for action in actions:
            if action.kind is ActionKind.F:
                held[action.stage] += 1
                yield action.stage, held
            elif action.kind in (ActionKind.B, ActionKind.W):
                held[action.stage] -= 1
