"""Schedules by name: which stage computes what, in which order. One function each, under a picture.

The pictures are drawn by :mod:`fxpart.schedule.draw` for stages that take one column forward and
two backward; a test draws each again and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fxpart.errors import error
from fxpart.schedule.action import FORWARD, Action, Kind, Schedule, StageEdge
from fxpart.schedule.dependence import chain, depths


def gpipe(stages: int, microbatches: int, edges: Iterable[StageEdge] | None = None) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    In flight on every stage: m. ``gpipe(3, 4)``::

        0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 == B1 == B2 == B3 ==
        1 | .  F0 F1 F2 F3 .  .  .  B0 == B1 == B2 == B3 == .  .
        2 | .  .  F0 F1 F2 F3 B0 == B1 == B2 == B3 == .  .  .  .

    edges are not needed: the order is the same for every stage graph.
    """
    _check(stages, microbatches)
    return _schedule("gpipe", stages, microbatches, [microbatches] * stages)


def one_f_one_b(
    stages: int, microbatches: int, edges: Iterable[StageEdge] | None = None
) -> Schedule:
    """One forward, one backward (Narayanan et al., PipeDream, SOSP 2019; flushed every step).

    Stage s runs as many forwards ahead as there are stages on the longest path behind it, then
    alternates. In flight on stage s of a chain of S: min(m, S - s). ``one_f_one_b(3, 4)``::

        0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == .  B2 == .  B3 ==
        1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == .  B3 == .  .
        2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == .  .  .  .

    edges: the stage graph; without it, a chain. On parallel branches the longest path, and with
    it the number in flight, is shorter than in a chain.
    """
    _check(stages, microbatches)
    return _schedule(
        "1f1b", stages, microbatches, depths(stages, chain(stages) if edges is None else edges)
    )


def forward_only(
    stages: int, microbatches: int, edges: Iterable[StageEdge] | None = None
) -> Schedule:
    """Forwards alone, for evaluation; nothing is kept in flight. ``forward_only(3, 4)``::

        0 | F0 F1 F2 F3 .  .
        1 | .  F0 F1 F2 F3 .
        2 | .  .  F0 F1 F2 F3

    edges are not needed: the order is the same for every stage graph.
    """
    _check(stages, microbatches)
    ranks = (tuple(Action(k, Kind.F, m) for m in range(microbatches)) for k in range(stages))
    return Schedule(FORWARD, stages, microbatches, tuple(ranks), tuple(range(stages)))


def _schedule(name: str, stages: int, microbatches: int, ahead: Iterable[int]) -> Schedule:
    """One stage a rank; stage k runs ahead[k] forwards, then alternates, then drains."""
    ranks = []
    for stage, most in enumerate(ahead):
        first = min(most, microbatches)
        actions = [Action(stage, Kind.F, m) for m in range(first)]
        for m in range(microbatches):
            actions.append(Action(stage, Kind.B, m))
            if first + m < microbatches:
                actions.append(Action(stage, Kind.F, first + m))
        ranks.append(tuple(actions))
    return Schedule(name, stages, microbatches, tuple(ranks), tuple(range(stages)))


def _check(stages: int, microbatches: int) -> None:
    for what, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise error("FXP109", where=f"{what}={value}", why="at least 1 is needed", fix="")


@dataclass(frozen=True)
class Builder:
    """A named schedule: ``build(stages, microbatches, edges=None)`` and what it keeps in flight.

    in_flight(stage, stages, microbatches): the most microbatches whose activations the stage
    holds at once in a chain (on other stage graphs at most as many).
    """

    build: Callable[..., Schedule]
    in_flight: Callable[[int, int, int], int]

    def __call__(
        self, stages: int, microbatches: int, edges: Iterable[StageEdge] | None = None
    ) -> Schedule:
        """The compute-only schedule, one stage a rank."""
        return self.build(stages, microbatches, edges)


BUILDERS: dict[str, Builder] = {
    "gpipe": Builder(gpipe, lambda stage, stages, microbatches: microbatches),
    "1f1b": Builder(
        one_f_one_b, lambda stage, stages, microbatches: min(microbatches, stages - stage)
    ),
    FORWARD: Builder(forward_only, lambda stage, stages, microbatches: 0),
}
