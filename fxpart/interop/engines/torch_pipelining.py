"""torch.distributed.pipelining: schedule class, microbatches, stages and their ranks.

Source: torch 2.13, distributed/pipelining/schedules.py and stage.py.
"""

from __future__ import annotations

import json
from typing import Any

from fxpart.interop.engines.engine_spec import EngineConfiguration, EngineSpec
from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.interop.engines.torch_schedules import CSV_FILE, find_schedule, find_stage_ranks


def write_torch_pipelining(degrees: PlanDegrees) -> EngineConfiguration:
    """Return the arguments of torch's schedule and stages as JSON, and a schedule as CSV."""
    schedule, csv = find_schedule(degrees)
    lost = [*degrees.lost, *_find_lost(degrees)]
    ranks = find_stage_ranks(degrees)
    config: dict[str, Any] = {
        "schedule": schedule,
        "schedule_csv": None if csv is None else CSV_FILE,
        "n_microbatches": degrees.microbatches,
        "num_stages": len(ranks),
        "stage_index_to_group_rank": list(ranks),
        "microbatch_rows": degrees.microbatch_rows,
        "layers": None if degrees.layers is None else [list(span) for span in degrees.layers],
        "lost": lost,
    }
    files = {"torch_pipelining.json": json.dumps(config, indent=2) + "\n"}
    if csv is not None:
        files[CSV_FILE] = csv
    hosts, each = degrees.ranks_per_host
    launch = f"torchrun --nnodes {hosts} --nproc-per-node {each} train.py"
    return EngineConfiguration(files, launch, tuple(lost))


def _find_lost(degrees: PlanDegrees) -> list[str]:
    """Return what torch's pipelining alone does not do."""
    found = []
    if degrees.data > 1:
        zero = f" with ZeRO {degrees.zero} over {degrees.shards} ranks" if degrees.zero else ""
        found.append(f"Data parallelism of degree {degrees.data}{zero}: wrap the stage modules in "
                     "DDP or FSDP.")  # fmt: skip
    if degrees.tensor > 1:
        found.append(f"Tensor parallelism of degree {degrees.tensor}: apply parallelize_module to "
                     "the stage modules.")  # fmt: skip
    found += degrees.list_lost_experts() + degrees.list_lost_context()
    if degrees.recompute != "none":
        found.append(f"Recomputation {degrees.recompute!r}: wrap the layers in checkpoint().")
    if degrees.plan.precision != "fp32":
        found.append(f"The precision {degrees.plan.precision}: run the stages under autocast.")
    if degrees.plan.ties:
        found.append("Gradients of tied parameters: sum them over their stages after each step.")
    found += degrees.list_lost_boundaries()
    return found


TORCH_PIPELINING = EngineSpec(
    name="torch-pipelining",
    package="torch",
    version="2.13",
    summary="Arguments of torch's pipeline schedule and stages, and its schedule as CSV.",
    write=write_torch_pipelining,
)
