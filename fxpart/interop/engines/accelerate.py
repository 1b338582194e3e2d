"""Accelerate: its configuration file, with FSDP2 or Megatron-LM as the backend.

Sources: accelerate 1.15.0, commands/config/config_args.py, commands/launch.py and
parallelism_config.py.
"""

from __future__ import annotations

import json

from fxpart.interop.engines.engine_spec import EngineConfiguration, EngineSpec
from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.schedule.builders.gpipe_1f1b import ONE_F_ONE_B
from fxpart.schedule.spec import SCHEDULES

Section = dict[str, str | int | bool]


def write_accelerate(degrees: PlanDegrees) -> EngineConfiguration:
    """Return the plan as a YAML file for ``accelerate launch``."""
    lost = [*degrees.lost, *_find_lost(degrees)]
    hosts, _ = degrees.ranks_per_host
    config: dict[str, str | int | bool | Section] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _find_type(degrees),
        "mixed_precision": {"fp32": "no"}.get(degrees.plan.precision, degrees.plan.precision),
        "num_machines": hosts,
        "num_processes": degrees.world,
        "machine_rank": 0,
        "use_cpu": False,
    }
    if degrees.pipeline > 1:
        config["megatron_lm_config"] = _find_megatron(degrees)
    else:
        if degrees.zero:
            config["fsdp_config"] = _find_fsdp(degrees)
        if degrees.tensor > 1 or degrees.zero:
            config["parallelism_config"] = _find_parallelism(degrees)
    launch = "accelerate launch --config_file accelerate.yaml train.py"
    return EngineConfiguration({"accelerate.yaml": _format_yaml(config, lost)}, launch, tuple(lost))


def _find_type(degrees: PlanDegrees) -> str:
    if degrees.pipeline > 1:
        return "MEGATRON_LM"
    if degrees.zero:
        return "FSDP"
    return "MULTI_GPU" if degrees.world > 1 else "NO"


def _find_fsdp(degrees: PlanDegrees) -> Section:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": degrees.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": degrees.recompute == "full",
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _find_parallelism(degrees: PlanDegrees) -> Section:
    """Return the mesh; Accelerate has no replicas with tensor parallelism without sharding."""
    return {
        "parallelism_config_dp_replicate_size": degrees.shard_replicas if degrees.zero else 1,
        "parallelism_config_dp_shard_size": degrees.shards if degrees.zero else degrees.data,
        "parallelism_config_tp_size": degrees.tensor,
        "parallelism_config_cp_size": 1,
    }


def _find_megatron(degrees: PlanDegrees) -> Section:
    found: Section = {
        "megatron_lm_tp_degree": degrees.tensor,
        "megatron_lm_pp_degree": degrees.pipeline,
        "megatron_lm_num_micro_batches": degrees.microbatches,
        "megatron_lm_use_distributed_optimizer": degrees.zero > 0,
    }
    if degrees.recompute != "none":
        found["megatron_lm_recompute_granularity"] = degrees.recompute
    if degrees.recompute == "full":
        found["megatron_lm_recompute_method"] = "uniform"
        found["megatron_lm_recompute_num_layers"] = 1
    if degrees.expert > 1:
        found["megatron_lm_expert_model_parallel_size"] = degrees.expert
    return found


def _format_yaml(config: dict[str, str | int | bool | Section], lost: list[str]) -> str:
    """Return the file; texts, numbers and truth values are the same in YAML as in JSON."""
    lines = ["# accelerate 1.15.0", *(f"# lost: {line}" for line in lost)]
    for name, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {json.dumps(item)}" for key, item in value.items()]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _find_lost(degrees: PlanDegrees) -> list[str]:
    """Return what Accelerate cannot express beside :attr:`PlanDegrees.lost`."""
    plan, found = degrees.plan, []
    spec = SCHEDULES.get(plan.schedule)
    rows = f"{degrees.microbatch_rows} rows per rank"
    found.append(f"The batch: give the DataLoader batch_size={degrees.microbatch_rows}.")
    if degrees.pipeline > 1:
        if plan.schedule != ONE_F_ONE_B and spec is not None and spec.flushes:
            found.append(f"The schedule {plan.schedule}: the Megatron-LM backend runs "
                         f"{ONE_F_ONE_B}.")  # fmt: skip
        if degrees.virtual > 1:
            found.append(f"{degrees.virtual} virtual stages per rank: each rank has one stage.")
        if not degrees.has_equal_stages:
            found.append("The stage boundaries: all stages get the same number of layers.")
        if degrees.zero > 1:
            found.append(f"ZeRO {degrees.zero}: with a pipeline it is ZeRO 1.")
        found += degrees.list_lost_hybrid()
    elif degrees.microbatches > 1:
        found.append(f"{degrees.microbatches} microbatches of {rows}: use Accelerator("
                     f"gradient_accumulation_steps={degrees.microbatches}).")  # fmt: skip
    if degrees.pipeline == 1:
        found += _find_lost_sharding(degrees)
    return found


def _find_lost_sharding(degrees: PlanDegrees) -> list[str]:
    """Return what FSDP2 and the mesh of Accelerate cannot express."""
    found = []
    if degrees.zero == 1:
        found.append("ZeRO 1: FSDP2 shards gradients and parameters, too.")
    if degrees.zero == 2:
        found.append("ZeRO 2: FSDP2 shards parameters, too.")
    if degrees.tensor > 1 and degrees.data > 1 and not degrees.zero:
        found.append("Replicas of tensor-parallel models: Accelerate shards their parameters.")
    if degrees.recompute == "selective" or (degrees.recompute == "full" and not degrees.zero):
        found.append(f"Recomputation {degrees.recompute!r}: the model's code calls it.")
    return found + degrees.list_lost_experts() + degrees.list_lost_context()


ACCELERATE = EngineSpec(
    name="accelerate",
    package="accelerate",
    version="1.15.0",
    summary="The YAML configuration of Accelerate, with FSDP2 or Megatron-LM as the backend.",
    write=write_accelerate,
)
