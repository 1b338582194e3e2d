"""Schedules by name: which stage computes what, in which order. One function each, under a picture.

The pictures are drawn by :mod:`fxpart.schedule.draw` for stages that take one column forward and
two backward; a test draws each again and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpart.errors import FxpartError
from fxpart.schedule.action import FORWARD, Schedule, StageEdge
from fxpart.schedule.builders.asynchronous import asynchronous, stream_in_flight
from fxpart.schedule.builders.looped import breadth_first, interleaved
from fxpart.schedule.builders.plain import ahead_in_a_chain, forward_only, gpipe, one_f_one_b
from fxpart.schedule.builders.protocol import Build, Groups, Ranks, checked, shares
from fxpart.schedule.builders.zero_bubble import in_a_v, zb_h1, zb_v
from fxpart.schedule.flight import in_flight

__all__ = [
    "BUILDERS", "Builder", "asynchronous", "breadth_first", "forward_only", "gpipe", "in_a_loop",
    "in_a_v", "interleaved", "limits", "one_f_one_b", "zb_h1", "zb_v",
]  # fmt: skip


class InFlight(Protocol):
    """By stage the most microbatches whose activations are held at once, on any stage graph."""

    def __call__(
        self, stage_rank: Ranks, microbatches: int, replicas: Groups = ()
    ) -> tuple[int, ...]:
        """The numbers."""
        ...


@dataclass(frozen=True)
class Builder:
    """A named schedule: ``build(stage_rank, microbatches, edges)`` and what it keeps in flight.

    in_flight(stage_rank, microbatches, replicas=()): by stage the most microbatches whose
    activations are held at once; met in a chain, on other stage graphs at most as many. flushes:
    whether the microbatches are those of one step, after which all stages update together.
    """

    build: Build
    in_flight: InFlight
    flushes: bool = True

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
        """The compute-only schedule; see :class:`fxpart.schedule.builders.protocol.Build`."""
        return self.build(
            stage_rank, microbatches, edges, forward=forward, backward=backward, replicas=replicas
        )


def _all(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
    stages = len(checked(stage_rank, microbatches))
    return tuple(map(len, shares(stages, microbatches, replicas)))


def _none(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
    return (0,) * len(checked(stage_rank, microbatches))


def _built(build: Build) -> InFlight:
    """What it has in flight in a chain, whose order it keeps on every stage graph."""

    def counted(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
        return in_flight(build(stage_rank, microbatches, replicas=replicas))

    return counted


def in_a_loop(stages: int, ranks: int) -> tuple[int, ...]:
    """The ranks of so many stages in a loop: (0, 1, 0, 1)."""
    return tuple(stage % ranks for stage in range(stages))


BUILDERS: dict[str, Builder] = {
    "gpipe": Builder(gpipe, _all),
    "1f1b": Builder(one_f_one_b, ahead_in_a_chain),
    "interleaved": Builder(interleaved, _built(interleaved)),
    "breadth-first": Builder(breadth_first, _all),
    "zb-h1": Builder(zb_h1, _built(zb_h1)),
    "zb-v": Builder(zb_v, _built(zb_v)),
    "async": Builder(asynchronous, stream_in_flight, flushes=False),
    FORWARD: Builder(forward_only, _none),
}


def limits(schedule: Schedule) -> tuple[int, ...] | None:
    """By stage what the builder of the schedule's name keeps in flight.

    None where there is no such builder, or it is not made for the schedule's ranks.
    """
    builder = BUILDERS.get(schedule.name)
    if builder is None:
        return None
    used = {rank: place for place, rank in enumerate(sorted(set(schedule.stage_rank)))}
    ranks = [used[rank] for rank in schedule.stage_rank]
    try:
        return builder.in_flight(ranks, schedule.microbatches, schedule.replicas)
    except FxpartError:
        return None
