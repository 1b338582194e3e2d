"""Schedules of plans by the names of torch.distributed.pipelining, or as CSV for it.

Source: torch 2.13, distributed/pipelining/schedules.py, ``get_schedule_class`` and ``_load_csv``.
"""

from __future__ import annotations

from dataclasses import replace

from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.plan.schedule import plan_schedule
from fxpart.schedule.builders.gpipe_1f1b import GPIPE, ONE_F_ONE_B
from fxpart.schedule.builders.virtual_stages import BREADTH_FIRST, INTERLEAVED
from fxpart.schedule.builders.zero_bubble import ZB_V
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.torch_csv import to_torch_csv

SCHEDULE_NAMES = {
    ONE_F_ONE_B: "1F1B",
    GPIPE: "GPipe",
    INTERLEAVED: "Interleaved1F1B",
    BREADTH_FIRST: "LoopedBFS",
    ZB_V: "ZBVZeroBubble",
}
CSV_RUNTIME = "PipelineScheduleMulti"
CSV_FILE = "schedule.csv"


def find_schedule(degrees: PlanDegrees) -> tuple[str, str | None]:
    """Return torch's name of the schedule, and the computations as CSV where it has no name.

    Schedules that torch cannot express (asynchronous ones, replicas of stages) become 1F1B.
    LoopedBFS runs the backwards of a stage in the reverse order, so breadth-first is CSV, too.
    """
    plan, count = degrees.plan, degrees.microbatches
    spec = SCHEDULES.get(plan.schedule)
    if plan.replicas or spec is None or not spec.flushes:
        return SCHEDULE_NAMES[ONE_F_ONE_B], None
    name = GPIPE if plan.schedule == BREADTH_FIRST and degrees.virtual == 1 else plan.schedule
    rounds = max(1, count // degrees.pipeline)
    uneven = name == INTERLEAVED and count % rounds
    if name in SCHEDULE_NAMES and name != BREADTH_FIRST and not uneven:
        return SCHEDULE_NAMES[name], None
    made = plan_schedule(plan)
    ranks = tuple(tuple(a for a in row if a.kind.is_compute) for row in made.ranks)
    return CSV_RUNTIME, to_torch_csv(replace(made, ranks=ranks)).replace("\r\n", "\n")


def find_stage_ranks(degrees: PlanDegrees) -> tuple[int, ...]:
    """Return the pipeline rank of each stage of the program."""
    place = {stage: rank for rank, stage in enumerate(degrees.plan.firsts)}
    return tuple(place[k] for _, _, k in degrees.plan.program_stages if k in place)
