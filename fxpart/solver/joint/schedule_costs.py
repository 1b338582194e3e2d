"""Properties of schedules in the objective: bubble and microbatches in flight.

Step time of S stages with m microbatches: T = fill * sum_s t_s + max_s((m - fill) t_s + beta_s).
Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021), interleaved
(Megatron-LM, SC'21), ZB-H1 (Qi et al. 2023, with a third of the bubble for equal times of F, B and
W), asynchronous 1F1B (PipeDream, SOSP'19; for its weight copies see :mod:`.weight_copies`).
"""

from __future__ import annotations

from fxpart.schedule.spec import SCHEDULES


def get_fill_fraction(schedule: str, virtual: int = 1) -> float:
    """Return the share of sum_s t_s that the pipeline bubble costs.

    0 also for schedules whose step time has no closed form and is simulated.
    """
    return SCHEDULES[schedule].fill / virtual


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
