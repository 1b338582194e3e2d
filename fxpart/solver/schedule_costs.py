"""Properties of schedules in the objective: bubble and microbatches in flight.

Step time of S stages with m microbatches: T = fill * sum_s t_s + max_s((m - fill) t_s + beta_s),
:func:`step_seconds`. Fill is 1 for GPipe and 1F1B. For the others it is the table's ``fill`` (a
third for ZB-H1, 1/v with v stages per rank) with at least S microbatches, and rises linearly to the
table's ``fill_of_one`` (two thirds for ZB-H1, 1 for the others) for a single one, which passes all
stages alone. Equal to the simulated schedules for equal stages whose backward takes twice the
forward.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021), interleaved
(Megatron-LM, SC'21), ZB-H1 (Qi et al. 2023, with a third of the bubble for equal times of F, B and
W), asynchronous 1F1B (PipeDream, SOSP'19; for its weight copies see :mod:`.weight_copies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from fxpart.schedule.spec import SCHEDULES


def get_fill_fraction(schedule: str, microbatches: int, stages: int, virtual: int = 1) -> float:
    """Return the share of sum_s t_s that the pipeline bubble costs; it never falls with the stages.

    stages: S, ranks in sequence. virtual: v, stages of the model on each of them. 0 also for
    schedules whose step time has no closed form and is simulated.
    """
    spec = SCHEDULES[schedule]
    full, alone = spec.fill / virtual, spec.fill_of_one
    if not spec.fill or microbatches >= stages:
        return full
    return full + (alone - full) * (stages - microbatches) / (stages - 1)


def split_stage_counts(
    schedule: str, microbatches: int, low: int, high: int
) -> list[tuple[int, int]]:
    """Return ranges of numbers of stages, from ``low`` to ``high``, with one fill in each."""
    fills = [get_fill_fraction(schedule, microbatches, count) for count in (low, high)]
    if fills[0] == fills[1]:
        return [(low, high)]
    return [(count, count) for count in range(low, high + 1)]


def step_seconds(times: Sequence[float], once: Sequence[float], m: int, fill: float) -> float:
    """Return T from t_s, beta_s, the microbatches and :func:`get_fill_fraction`."""
    return fill * fsum(times) + max((m - fill) * t + b for t, b in zip(times, once, strict=True))


def splits_backward(schedule: str) -> bool:
    """Return whether the backward of a microbatch is two actions, which takes longer than one."""
    return SCHEDULES[schedule].splits_backward


def has_graph_form(schedule: str) -> bool:
    """Return whether the closed form holds for stages that form a graph with branches."""
    spec = SCHEDULES[schedule]
    return spec.in_flight_form in ("all", "to end") and spec.fill == 1.0


def needs_whole_depth(schedule: str) -> bool:
    """Return whether every stage has as many microbatches in flight as the pipeline is deep."""
    return SCHEDULES[schedule].in_flight_form == "depth"


def keeps_all(schedule: str) -> bool:
    """Return whether every stage has all microbatches in flight."""
    return SCHEDULES[schedule].in_flight_form == "all"


def has_pieces(schedule: str) -> bool:
    """Return whether a stage has several pieces, whose number is a decision."""
    return SCHEDULES[schedule].in_flight_form == "pieces"


def is_stream(schedule: str) -> bool:
    """Return whether the next minibatch follows without a flush, so that stages copy weights."""
    return SCHEDULES[schedule].in_flight_form == "asynchronous"


def count_stage_in_flight(
    schedule: str, microbatches: int, stages: int, stage: int, virtual: int = 1
) -> int:
    """Return the microbatches in flight at the peak of stage ``stage`` of ``stages``.

    m for GPipe; min(m, S - s) for 1F1B; min(m, S) for ZB-H1, whose delayed W's use the memory of
    the first stage of 1F1B; S - s for the asynchronous schedule, whose next minibatch follows at
    once. Interleaved has 2 (S - s - 1) + (v - 1) S + 1 pieces of 1/v each in flight, rounded up to
    whole microbatches.
    """
    to_end, form = stages - stage, SCHEDULES[schedule].in_flight_form
    if form == "asynchronous":
        return to_end
    if form == "all":
        return microbatches
    if form == "depth":
        return min(microbatches, stages)
    if form == "pieces" and virtual > 1:
        pieces = 2 * (to_end - 1) + (virtual - 1) * stages + 1
        return min(microbatches, -(-pieces // virtual))
    return min(microbatches, to_end)
