"""torchtitan: its command-line arguments, and the TOML files of its versions before 0.3.

Sources: torchtitan 0.3.0, config/configs.py, config/manager.py and
distributed/pipeline_parallel.py; torchtitan 0.2.2, config/job_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from fxpart.interop.engines.argument_file import format_arguments
from fxpart.interop.engines.engine_spec import EngineConfiguration, EngineSpec
from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.interop.engines.torch_schedules import CSV_FILE, find_schedule, find_stage_ranks
from fxpart.interop.engines.torchtitan_reader import looks_like_torchtitan, read_torchtitan

Settings = dict[str, dict[str, object]]
_FP8 = "8-bit linear layers: use a configuration of torchtitan with Float8LinearConverter."


def write_torchtitan(degrees: PlanDegrees) -> EngineConfiguration:
    """Return the plan as arguments for torchtitan 0.3 and as TOML for the versions before."""
    schedule, csv = find_schedule(degrees)
    settings = _find_settings(degrees, schedule, csv is not None)
    lost = (*degrees.lost, *_find_lost(degrees))
    heads = ("torchtitan 0.3.0: add --module and --config of the model.", *_lost_lines(lost))
    older = ("torchtitan 0.2.2: add [model] and the other sections.", *_lost_lines(lost))
    files = {
        "torchtitan.args": format_arguments(_find_rows(degrees, settings), heads),
        "torchtitan.toml": _format_toml(degrees, settings, older),
    }
    if csv is not None:
        files[CSV_FILE] = csv
    hosts, each = degrees.ranks_per_host
    launch = (
        f"grep -v '^#' torchtitan.args | xargs torchrun --nnodes {hosts} --nproc-per-node {each} "
        "-m torchtitan.train --module llama3 --config llama3_8b"
    )
    return EngineConfiguration(files, launch, lost)


def _find_settings(degrees: PlanDegrees, schedule: str, has_csv: bool) -> Settings:
    """Return the options that both versions have, by section."""
    plan, pipelined = degrees.plan, degrees.pipeline > 1
    local = degrees.microbatch_rows * (degrees.microbatches if pipelined else 1)
    training: dict[str, object] = {
        "local_batch_size": local,
        "global_batch_size": degrees.rows,
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
    }
    if degrees.sequence is not None:
        training["seq_len"] = degrees.sequence
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": degrees.shard_replicas,
        "data_parallel_shard_degree": degrees.shards,
        "fsdp_reshard_after_forward": "always" if degrees.zero == 3 else "never",
        "tensor_parallel_degree": degrees.tensor,
        "expert_parallel_degree": degrees.expert,
        "pipeline_parallel_degree": degrees.pipeline,
    }
    if degrees.context > 1:
        parallelism["context_parallel_degree"] = degrees.context
    if pipelined:
        parallelism["pipeline_parallel_schedule"] = schedule
        parallelism["pipeline_parallel_microbatch_size"] = degrees.microbatch_rows
        if has_csv:
            parallelism["pipeline_parallel_schedule_csv"] = CSV_FILE
    return {"training": training, "parallelism": parallelism, "debug": {"seed": plan.seed}}


def _find_parts(degrees: PlanDegrees, head: str) -> list[list[str]] | None:
    """Return torchtitan's modules of each stage of the program; head: its name of the last one."""
    if degrees.layers is None or degrees.pipeline == 1:
        return None
    parts = [[f"layers.{i}" for i in range(first, end)] for first, end in degrees.layers]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _find_rows(degrees: PlanDegrees, settings: Settings) -> list[list[object]]:
    """Return the arguments of version 0.3."""
    rows = [
        [f"--{section}.{name}={value}"]
        for section, options in settings.items()
        for name, value in options.items()
    ]
    found: list[list[object]] = [list(row) for row in rows]
    if degrees.pipeline > 1:
        found.append(["--training.disable_cuda_graphs"])  # required with pipeline parallelism
    parts = _find_parts(degrees, "lm_head")
    if parts is not None:
        names = [",".join(part) for part in parts]
        found.append(["--parallelism.module_fqns_per_model_part", *names])
    found.append([f"activation-checkpoint:{degrees.recompute}"])
    return found


def _format_toml(degrees: PlanDegrees, settings: Settings, comments: Iterable[str]) -> str:
    """Return the sections for the versions before 0.3."""
    parallelism = dict(settings["parallelism"])
    parts = _find_parts(degrees, "output")
    if parts is not None:
        parallelism["module_fqns_per_model_part"] = parts
    sections: Settings = {
        **settings,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": degrees.recompute},
    }
    lines = [f"# {line}" for line in comments]
    for section, options in sections.items():
        lines += ["", f"[{section}]"]
        # Numbers, texts and lists of texts are the same in TOML as in JSON.
        lines += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(lines) + "\n"


def _find_lost(degrees: PlanDegrees) -> list[str]:
    """Return what torchtitan cannot express beside :attr:`PlanDegrees.lost`."""
    found = []
    if degrees.zero == 1:
        found.append("ZeRO 1: FSDP2 shards parameters and gradients, too, and gathers the "
                     "parameters once per step.")  # fmt: skip
    if degrees.zero == 2:
        found.append("ZeRO 2: FSDP2 shards parameters, too, and gathers them once per step.")
    found += degrees.list_lost_boundaries()
    if degrees.expert > 1 and not degrees.zero:
        found.append("Expert parallelism without ZeRO: torchtitan takes the experts' ranks from "
                     "those that shard parameters.")  # fmt: skip
    ranks = find_stage_ranks(degrees)
    loop = tuple(range(degrees.pipeline)) * degrees.virtual
    if find_schedule(degrees)[1] is not None and ranks != loop:
        listed = ", ".join(map(str, ranks))
        found.append(f"The ranks {listed} of the stages: with a CSV, torchtitan places them in a "
                     "loop.")  # fmt: skip
    if degrees.plan.precision == "fp8":
        found.append(_FP8)
    if degrees.plan.optimizer not in ("adam", "adamw"):
        found.append(f"The optimizer {degrees.plan.optimizer}: torchtitan selects it in a "
                     "configuration function.")  # fmt: skip
    return found


def _lost_lines(lost: Iterable[str]) -> list[str]:
    return [f"lost: {line}" for line in lost]


TORCHTITAN = EngineSpec(
    name="torchtitan",
    package="torchtitan",
    version="0.3.0",
    summary="Arguments for torchtitan 0.3, and a TOML file for the versions before.",
    write=write_torchtitan,
    read=read_torchtitan,
    looks_like=looks_like_torchtitan,
)
