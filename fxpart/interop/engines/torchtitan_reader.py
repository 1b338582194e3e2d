"""Read what a configuration of torchtitan decides: TOML before 0.3, arguments since.

Defaults are those of torchtitan 0.3.0 and 0.2.2, which are the same for the options read here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fxpart.errors import error
from fxpart.files import toml
from fxpart.interop.engines.argument_file import parse_arguments
from fxpart.interop.engines.configuration_values import ConfigurationValues
from fxpart.interop.engines.engine_spec import EngineRun
from fxpart.interop.engines.torch_schedules import SCHEDULE_NAMES
from fxpart.schedule.spec import list_closed_forms
from fxpart.solver.schedule_costs import has_pieces

Constraints = dict[str, int | float | str | bool]
_RECOMPUTE = ("none", "selective", "full")


def looks_like_torchtitan(text: str) -> bool:
    """Return whether a text has a section or an option of torchtitan's parallelism."""
    return "[parallelism]" in text or "--parallelism." in text or "[training]" in text


def read_torchtitan(text: str, where: str) -> EngineRun:
    """Return the decisions of a TOML file, or of a file of arguments. Raises FXP407."""
    values = ConfigurationValues(_parse(text, where), where)
    tensor, pipeline = (
        values.count(f"parallelism.{kind}_parallel_degree") for kind in ("tensor", "pipeline")
    )
    constraints: Constraints = {"tp": tensor, "pp": pipeline}
    lost: list[str] = []
    expert = values.count("parallelism.expert_parallel_degree")
    if expert > 1:
        constraints["ep"] = expert
    context = values.count("parallelism.context_parallel_degree")
    if context > 1:
        constraints["cp"] = context
    data = _read_data(values, constraints, lost)
    _read_schedule(values, pipeline, constraints, lost)
    _read_recompute(values, constraints, lost)
    if values.text("training.mixed_precision_param", "bfloat16") == "bfloat16":
        constraints["precision"] = "bf16"
    local = values.number("training.local_batch_size", 8)
    batch = values.number("training.global_batch_size", -1, least=-1)
    size = values.count("parallelism.pipeline_parallel_microbatch_size")
    assert local is not None and batch is not None
    return EngineRun(
        constraints, data=data, microbatch_rows=size if pipeline > 1 else local,
        microbatches=max(1, local // size) if pipeline > 1 else None,
        batch_size=batch if batch > 0 else None, lost=tuple(lost),
        divide=partial(
            divide_by_weight, stages=pipeline, virtual=int(constraints.get("virtual", 1)),
            size=values.number("parallelism.pipeline_parallel_layers_per_stage"),
            before=values.count("parallelism.pipeline_parallel_first_stage_less_layers"),
            after=values.count("parallelism.pipeline_parallel_last_stage_less_layers"),
        ),
    )  # fmt: skip


def divide_by_weight(
    layers: int,
    stages: int,
    before: int = 1,
    after: int = 1,
    *,
    virtual: int = 1,
    size: int | None = None,
) -> tuple[int, ...]:
    """Return the layers of each stage without a list of modules; () where torchtitan refuses.

    stages: pipeline ranks; virtual: stages of each. size: the most layers of a stage, which
    determine ``virtual``. before, after: what the embedding and the head count, in layers. Source:
    torchtitan 0.3.0, ``_get_pipeline_metadata`` and ``_generate_llm_fqn_per_model_part``.
    """
    whole = layers + before + after
    count = stages * virtual if size is None else -(-whole // size)
    each, more = divmod(whole, count)
    refused = count % stages or (virtual == 1) != (count == stages)
    if count < 2 or before > each or after > each or refused:
        return ()
    stages = count
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= before
    counts[-1] -= after
    return tuple(counts)


def _parse(text: str, where: str) -> dict[str, Any]:
    """Return the options by name with their section."""
    if "--parallelism." in text or "--training." in text:
        found: dict[str, Any] = dict(parse_arguments(text, where))
        for word in text.split():
            if word.startswith("activation-checkpoint:"):
                found["activation_checkpoint.mode"] = word.partition(":")[2]
        return found
    try:
        parsed = toml(text)
    except (ValueError, RecursionError) as why:
        raise error(
            "FXP407", where=where, why=f"It is not TOML: {why}.",
            fix="Pass a TOML file of torchtitan, or a file with its arguments.",
        ) from why  # fmt: skip
    return {
        f"{section}.{name}": value
        for section, options in parsed.items()
        if isinstance(options, dict)
        for name, value in options.items()
    }


def _read_data(
    values: ConfigurationValues, constraints: Constraints, lost: list[str]
) -> int | None:
    """Read the data-parallel degree and the ZeRO level; None where all other ranks are used."""
    replicas = values.count("parallelism.data_parallel_replicate_degree")
    shards = values.number("parallelism.data_parallel_shard_degree", -1, least=-1)
    assert shards is not None
    policy = values.text("parallelism.fsdp_reshard_after_forward", "default")
    pipelined = values.count("parallelism.pipeline_parallel_degree") > 1
    reshards = policy == "always" or (policy == "default" and not pipelined)
    constraints["zero"] = 0 if shards == 1 else 3 if reshards else 2
    if replicas > 1 and shards > 1:
        constraints["shard_degree"] = shards
    elif replicas > 1 and shards < 1:
        lost.append("Hybrid sharding is priced as sharding over all data-parallel ranks.")
    if shards < 1:
        return None
    return replicas * shards


def _read_schedule(
    values: ConfigurationValues, pipeline: int, constraints: Constraints, lost: list[str]
) -> None:
    """Read the schedule, the virtual stages and the boundaries of the stages."""
    if pipeline == 1:
        return
    name = values.text("parallelism.pipeline_parallel_schedule", "1F1B")
    known = {theirs.lower(): ours for ours, theirs in SCHEDULE_NAMES.items()}
    schedule = known.get(name.lower())
    if schedule is None or schedule not in list_closed_forms():
        lost.append(f"The schedule {name} is not priced; the planner's choice is.")
    else:
        constraints["schedule"] = schedule
        if has_pieces(schedule):
            constraints["virtual"] = 2
    parts = values.raw("parallelism.module_fqns_per_model_part")
    if not isinstance(parts, list) or len(parts) < 2:
        return
    names = [part.split(",") if isinstance(part, str) else list(part) for part in parts]
    counts = [sum(str(name).startswith("layers.") for name in part) for part in names]
    turns, more = divmod(len(parts), pipeline)
    virtual = "virtual" in constraints
    if virtual:
        constraints["virtual"] = max(1, turns)
    if not more and (turns > 1) == virtual and all(counts[1:-1]):
        stages = ["t" * count for count in counts]
        constraints["layout"] = "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
    else:
        lost.append("The boundaries of these stages are not priced; the planner's are.")


def _read_recompute(values: ConfigurationValues, constraints: Constraints, lost: list[str]) -> None:
    mode = values.text("activation_checkpoint.mode", "selective")
    if mode in _RECOMPUTE:
        constraints["recompute"] = mode
    else:
        lost.append(f"Activation checkpointing of the kind {mode} is not priced.")
