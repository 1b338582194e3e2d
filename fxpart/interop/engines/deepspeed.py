"""DeepSpeed: its configuration file.

Sources: deepspeed 0.19.8, runtime/config.py, runtime/zero/config.py, runtime/pipe/module.py and
runtime/tensor_parallel/config.py.
"""

from __future__ import annotations

import json
from typing import Any

from fxpart.interop.engines.engine_spec import EngineConfiguration, EngineSpec
from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.schedule.builders.gpipe_1f1b import ONE_F_ONE_B
from fxpart.schedule.spec import SCHEDULES


def write_deepspeed(degrees: PlanDegrees) -> EngineConfiguration:
    """Return the plan as ds_config.json."""
    lost = [*degrees.lost, *_find_lost(degrees)]
    config: dict[str, Any] = {
        "train_batch_size": degrees.rows,
        "train_micro_batch_size_per_gpu": degrees.microbatch_rows,
        "gradient_accumulation_steps": degrees.microbatches,
        "zero_optimization": {"stage": _find_zero(degrees)},
        "bf16": {"enabled": degrees.plan.precision != "fp32"},
        "seed": degrees.plan.seed,
    }
    if degrees.pipeline > 1:
        interval = 1 if degrees.recompute == "full" else 0
        config["pipeline"] = {
            "stages": degrees.pipeline,
            "activation_checkpoint_interval": interval,
        }
    if degrees.tensor > 1 and degrees.pipeline == 1:
        config["tensor_parallel"] = {"autotp_size": degrees.tensor}
    hosts, each = degrees.ranks_per_host
    launch = (
        f"deepspeed --num_nodes {hosts} --num_gpus {each} train.py --deepspeed_config "
        "ds_config.json"
    )
    return EngineConfiguration(
        {"ds_config.json": json.dumps(config, indent=2) + "\n"}, launch, tuple(lost)
    )


def _find_zero(degrees: PlanDegrees) -> int:
    """Return the ZeRO level; pipelines of DeepSpeed have at most 1."""
    return min(degrees.zero, 1) if degrees.pipeline > 1 else degrees.zero


def _find_lost(degrees: PlanDegrees) -> list[str]:
    """Return what DeepSpeed cannot express beside :attr:`PlanDegrees.lost`."""
    plan, found = degrees.plan, []
    spec = SCHEDULES.get(plan.schedule)
    if degrees.pipeline > 1:
        if plan.schedule != ONE_F_ONE_B and spec is not None and spec.flushes:
            found.append(f"The schedule {plan.schedule}: DeepSpeed runs {ONE_F_ONE_B}.")
        if degrees.virtual > 1:
            found.append(f"{degrees.virtual} virtual stages per rank: each rank has one stage.")
        if degrees.zero > 1:
            found.append(f"ZeRO {degrees.zero}: pipelines of DeepSpeed allow ZeRO 1.")
        if degrees.tensor > 1:
            found.append(f"Tensor parallelism of degree {degrees.tensor}: DeepSpeed has none with "
                         "a pipeline, the layers need their own.")  # fmt: skip
        found.append(_describe_stages(degrees))
    if degrees.recompute != "none" and (degrees.pipeline == 1 or degrees.recompute != "full"):
        found.append(f"Recomputation {degrees.recompute!r}: the model's code calls it.")
    found += degrees.list_lost_hybrid()
    found += degrees.list_lost_experts("pass ep_size to the MoE layers")
    found += degrees.list_lost_context()
    if plan.precision == "fp8":
        found.append("8-bit linear layers.")
    found.append(f"The optimizer {plan.optimizer}: pass it to deepspeed.initialize.")
    return found


def _describe_stages(degrees: PlanDegrees) -> str:
    """Return the sentence on stage boundaries, which PipelineModule computes itself."""
    if degrees.has_equal_stages:
        return "The stage boundaries: pass partition_method='uniform' to PipelineModule."
    if degrees.layers is None:
        return "The stage boundaries: PipelineModule balances parameters or counts of layers."
    counts = ", ".join(str(end - first) for first, end in degrees.layers)
    return f"Stages of {counts} layers: PipelineModule balances parameters or counts of layers."


DEEPSPEED = EngineSpec(
    name="deepspeed",
    package="deepspeed",
    version="0.19.8",
    summary="The JSON configuration of DeepSpeed.",
    write=write_deepspeed,
)
