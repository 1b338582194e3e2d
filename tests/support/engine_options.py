"""Options of other engines, as their versions name them; written from their sources by hand.

torchtitan 0.3.0: config/configs.py. Megatron-LM core_v0.16.1: megatron/training/arguments.py and
the fields of TransformerConfig. deepspeed 0.19.8: runtime/config.py. accelerate 1.15.0:
commands/config/config_args.py and commands/launch.py.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import pytest

from fxpart.interop.engines import ENGINES

TORCHTITAN = {
    "training.local_batch_size": int,
    "training.global_batch_size": int,
    "training.seq_len": int,
    "training.mixed_precision_param": ("bfloat16", "float32"),
    "parallelism.data_parallel_replicate_degree": int,
    "parallelism.data_parallel_shard_degree": int,
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "parallelism.tensor_parallel_degree": int,
    "parallelism.expert_parallel_degree": int,
    "parallelism.pipeline_parallel_degree": int,
    "parallelism.pipeline_parallel_schedule": (
        "1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble",
        "PipelineScheduleSingle", "PipelineScheduleMulti", "ZBVZeroBubble", "DualPipeV",
    ),
    "parallelism.pipeline_parallel_schedule_csv": ("schedule.csv",),
    "parallelism.pipeline_parallel_microbatch_size": int,
    "debug.seed": int,
}  # fmt: skip
TORCHTITAN_ALONE = {
    "training.disable_cuda_graphs", "parallelism.module_fqns_per_model_part",
}  # fmt: skip
CHECKPOINTING = ("none", "selective", "full")
MEGATRON = {
    "tensor_model_parallel_size": int,
    "pipeline_model_parallel_size": int,
    "expert_model_parallel_size": int,
    "micro_batch_size": int,
    "global_batch_size": int,
    "num_layers": int,
    "seq_length": int,
    "pipeline_model_parallel_layout": str,
    "num_virtual_stages_per_pipeline_rank": int,
    "use_distributed_optimizer": None,
    "use_megatron_fsdp": None,
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "ckpt_format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "recompute_num_layers": int,
    "bf16": None,
    "fp8_format": ("e4m3", "hybrid"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon"),
    "seed": int,
}
DEEPSPEED = {
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "zero_optimization.stage": int,
    "bf16.enabled": bool,
    "seed": int,
    "pipeline.stages": int,
    "pipeline.activation_checkpoint_interval": int,
    "tensor_parallel.autotp_size": int,
}
ACCELERATE = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_GPU", "FSDP", "MEGATRON_LM"),
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),
    "num_machines": int,
    "num_processes": int,
    "machine_rank": int,
    "use_cpu": bool,
    "fsdp_config.fsdp_version": int,
    "fsdp_config.fsdp_reshard_after_forward": bool,
    "fsdp_config.fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_config.fsdp_activation_checkpointing": bool,
    "fsdp_config.fsdp_offload_params": bool,
    "fsdp_config.fsdp_state_dict_type": ("SHARDED_STATE_DICT",),
    "parallelism_config.parallelism_config_dp_replicate_size": int,
    "parallelism_config.parallelism_config_dp_shard_size": int,
    "parallelism_config.parallelism_config_tp_size": int,
    "parallelism_config.parallelism_config_cp_size": int,
    "megatron_lm_config.megatron_lm_tp_degree": int,
    "megatron_lm_config.megatron_lm_pp_degree": int,
    "megatron_lm_config.megatron_lm_num_micro_batches": int,
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": bool,
    "megatron_lm_config.megatron_lm_recompute_granularity": ("full", "selective"),
    "megatron_lm_config.megatron_lm_recompute_method": ("uniform", "block"),
    "megatron_lm_config.megatron_lm_recompute_num_layers": int,
    "megatron_lm_config.megatron_lm_expert_model_parallel_size": int,
}


def is_allowed(value: object, allowed: object) -> bool:
    """Whether a value, or its text on a command line, has the type or is one of the choices."""
    if isinstance(allowed, tuple):
        return value in allowed
    if allowed is None:
        return value in ([], "", True)
    if allowed is int and isinstance(value, str):
        return value.isdecimal()
    return type(value) is allowed


def need(engine: str, module: str) -> Any:
    """Import a module of an engine; skip where the package or its version is not there."""
    spec = ENGINES[engine]
    try:
        found = metadata.version(spec.package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{spec.package} is not installed")
    if found != spec.version:
        pytest.skip(f"{spec.package} {found} is installed, not {spec.version}")
    try:
        return importlib.import_module(module)
    except ImportError as why:
        pytest.skip(f"{spec.package} is not complete: {why}")
