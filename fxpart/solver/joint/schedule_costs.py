"""What the objective knows of each schedule: its bubble and what it keeps in flight.

Step time of S stages with m microbatches: T = fill * sum_s t_s + max_s((m - fill) t_s + beta_s).
Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021), interleaved
(Megatron-LM, SC'21), ZB-H1 (Qi et al. 2023, whose bubble is a third where F, B and W take equal
times), asynchronous 1F1B (PipeDream, SOSP'19; its copies of weights: :mod:`.copies`).
"""

from __future__ import annotations

from fxpart.schedule.spec import SCHEDULES


def get_fill_fraction(schedule: str, virtual: int = 1) -> float:
    """The share of sum_s t_s that filling and draining the pipeline costs.

    0 also for schedules whose step is not a closed form but simulated.
    """
    return SCHEDULES[schedule].fill / virtual


def needs_whole_depth(schedule: str) -> bool:
    """Whether every stage keeps as many microbatches as the whole pipeline is deep."""
    return SCHEDULES[schedule].in_flight_form == "depth"


def keeps_all(schedule: str) -> bool:
    """Whether every stage keeps all microbatches."""
    return SCHEDULES[schedule].in_flight_form == "all"


def has_pieces(schedule: str) -> bool:
    """Whether a stage has several pieces, whose number is chosen."""
    return SCHEDULES[schedule].in_flight_form == "pieces"


def is_stream(schedule: str) -> bool:
    """Whether the next minibatch follows without a flush, so that stages keep copies of weights."""
    return SCHEDULES[schedule].in_flight_form == "asynchronous"


def count_stage_in_flight(
    schedule: str, microbatches: int, stages: int, stage: int, virtual: int = 1
) -> int:
    """Microbatches whose activations stage ``stage`` of ``stages`` holds at its peak.

    m for GPipe; min(m, S - s) for 1F1B; min(m, S) for ZB-H1, whose late W's fill what the first
    stage of 1F1B may hold; S - s for the asynchronous schedule, whose next minibatch follows at
    once; interleaved holds 2 (S - s - 1) + (v - 1) S + 1 pieces of one v-th each, here rounded up
    to whole microbatches.
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
