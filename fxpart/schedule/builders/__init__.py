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
from fxpart.schedule.builders.asynchronous import asynchronous, count_async_in_flight
from fxpart.schedule.builders.gpipe_1f1b import (
    count_1f1b_in_flight,
    forward_only,
    gpipe,
    one_f_one_b,
)
from fxpart.schedule.builders.protocol import (
    BuildFunction,
    Groups,
    Ranks,
    assign_microbatches,
    validate_stage_rank,
)
from fxpart.schedule.builders.virtual_stages import breadth_first, interleaved
from fxpart.schedule.builders.zero_bubble import assign_v_ranks, zb_h1, zb_v
from fxpart.schedule.in_flight import count_in_flight

__all__ = [
    "BUILDERS",
    "ScheduleBuilder",
    "assign_loop_ranks",
    "assign_v_ranks",
    "asynchronous",
    "breadth_first",
    "forward_only",
    "get_in_flight_limits",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zb_h1",
    "zb_v",
]  # fmt: skip


class InFlightFunction(Protocol):
    """By stage the most microbatches whose activations are held at once, on any stage graph."""

    def __call__(
        self, stage_rank: Ranks, microbatches: int, replicas: Groups = ()
    ) -> tuple[int, ...]:
        """The numbers."""
        ...


@dataclass(frozen=True)
class ScheduleBuilder:
    """A named schedule: ``build(stage_rank, microbatches, edges)`` and what it keeps in flight.

    in_flight(stage_rank, microbatches, replicas=()): by stage the most microbatches whose
    activations are held at once; met in a chain, on other stage graphs at most as many. flushes:
    whether the microbatches are those of one step, after which all stages update together.
    """

    build: BuildFunction
    in_flight: InFlightFunction
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
        """Build the compute-only schedule; see :class:`.protocol.BuildFunction`."""
        return self.build(
            stage_rank, microbatches, edges, forward=forward, backward=backward, replicas=replicas
        )


def _all(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
    stages = len(validate_stage_rank(stage_rank, microbatches))
    return tuple(map(len, assign_microbatches(stages, microbatches, replicas)))


def _none(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
    return (0,) * len(validate_stage_rank(stage_rank, microbatches))


def _built(build: BuildFunction) -> InFlightFunction:
    """What it has in flight in a chain, whose order it keeps on every stage graph."""

    def counted(stage_rank: Ranks, microbatches: int, replicas: Groups = ()) -> tuple[int, ...]:
        return count_in_flight(build(stage_rank, microbatches, replicas=replicas))

    return counted


def assign_loop_ranks(stages: int, ranks: int) -> tuple[int, ...]:
    """The ranks of so many stages in a loop: (0, 1, 0, 1)."""
    return tuple(stage % ranks for stage in range(stages))


BUILDERS: dict[str, ScheduleBuilder] = {
    "gpipe": ScheduleBuilder(gpipe, _all),
    "1f1b": ScheduleBuilder(one_f_one_b, count_1f1b_in_flight),
    "interleaved": ScheduleBuilder(interleaved, _built(interleaved)),
    "breadth-first": ScheduleBuilder(breadth_first, _all),
    "zb-h1": ScheduleBuilder(zb_h1, _built(zb_h1)),
    "zb-v": ScheduleBuilder(zb_v, _built(zb_v)),
    "async": ScheduleBuilder(asynchronous, count_async_in_flight, flushes=False),
    FORWARD: ScheduleBuilder(forward_only, _none),
}


def get_in_flight_limits(schedule: Schedule) -> tuple[int, ...] | None:
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
