"""Megatron-LM: its command-line arguments.

Sources: Megatron-LM core_v0.16.1, megatron/training/arguments.py,
megatron/core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.errors import FxpartError
from fxpart.interop.engines.argument_file import format_arguments, parse_arguments
from fxpart.interop.engines.configuration_values import ConfigurationValues
from fxpart.interop.engines.engine_spec import EngineConfiguration, EngineRun, EngineSpec
from fxpart.interop.engines.plan_degrees import PlanDegrees
from fxpart.schedule.builders.gpipe_1f1b import ONE_F_ONE_B
from fxpart.schedule.builders.virtual_stages import INTERLEAVED
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.joint.constraints.megatron_layout import expand_layout, format_layout

Row = list[object]
_TELLING = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size",
    "--use-distributed-optimizer",
)  # fmt: skip
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}


def write_megatron(degrees: PlanDegrees) -> EngineConfiguration:
    """Return the plan as arguments of pretrain_gpt.py and its relatives."""
    lost = [*degrees.lost, *_find_lost(degrees)]
    rows: list[Row] = [
        ["--tensor-model-parallel-size", degrees.tensor],
        ["--pipeline-model-parallel-size", degrees.pipeline],
        ["--micro-batch-size", degrees.microbatch_rows],
        ["--global-batch-size", degrees.rows],
    ]
    if degrees.layer_count:
        rows.append(["--num-layers", degrees.layer_count])
    if degrees.sequence is not None:
        rows.append(["--seq-length", degrees.sequence])
    if degrees.expert > 1:
        rows.append(["--expert-model-parallel-size", degrees.expert])
    if degrees.context > 1:
        rows.append(["--context-parallel-size", degrees.context])
    rows += _find_stage_rows(degrees)
    rows += _find_memory_rows(degrees)
    if degrees.plan.precision in ("bf16", "fp8"):
        rows.append(["--bf16"])
    if degrees.plan.precision == "fp8":
        rows.append(["--fp8-format", "hybrid"])
    if degrees.plan.optimizer in _OPTIMIZERS:
        rows.append(["--optimizer", _OPTIMIZERS[degrees.plan.optimizer]])
    if degrees.plan.seed:
        rows.append(["--seed", degrees.plan.seed])
    heads = (
        "Megatron-LM core_v0.16.1: add the sizes of the model, data and learning rate.",
        *(f"lost: {line}" for line in lost),
    )
    hosts, each = degrees.ranks_per_host
    launch = (
        f"grep -v '^#' megatron.args | xargs torchrun --nnodes {hosts} --nproc-per-node {each} "
        "pretrain_gpt.py"
    )
    return EngineConfiguration(
        {"megatron.args": format_arguments(rows, heads)}, launch, tuple(lost)
    )


def _find_stage_rows(degrees: PlanDegrees) -> list[Row]:
    """Return the options of virtual stages and of unequal ones."""
    if degrees.pipeline == 1:
        return []
    layout = find_layout(degrees)
    looped = degrees.virtual > 1 and SCHEDULES[degrees.plan.schedule].placement != "V"
    if layout is not None and not degrees.has_equal_stages:
        return [["--pipeline-model-parallel-layout", layout]]
    return [["--num-virtual-stages-per-pipeline-rank", degrees.virtual]] if looped else []


def find_layout(degrees: PlanDegrees) -> str | None:
    """Return the stages in the notation ``Ett|tt|ttL``; None where they cannot be expressed.

    Megatron-LM places virtual stages in a loop over the ranks, as fxpart's interleaved schedule.
    """
    if degrees.layers is None or degrees.plan.replicas:
        return None
    if degrees.virtual > 1 and len(degrees.layers) != degrees.pipeline * degrees.virtual:
        return None
    if degrees.virtual > 1 and SCHEDULES[degrees.plan.schedule].placement == "V":
        return None
    return format_layout([end - first for first, end in degrees.layers])


def _find_memory_rows(degrees: PlanDegrees) -> list[Row]:
    """Return the options of ZeRO and recomputation."""
    rows: list[Row] = []
    if degrees.zero == 1:
        rows.append(["--use-distributed-optimizer"])
        if degrees.shard_replicas > 1:
            rows.append(["--num-distributed-optimizer-instances", degrees.shard_replicas])
    elif degrees.zero:
        rows += [
            ["--use-distributed-optimizer"],
            ["--use-megatron-fsdp"],
            ["--data-parallel-sharding-strategy", _SHARDING[degrees.zero]],
            ["--ckpt-format", "fsdp_dtensor"],  # required by --use-megatron-fsdp
        ]
    if degrees.recompute == "selective":
        rows.append(["--recompute-granularity", "selective"])
    elif degrees.recompute == "full":
        rows.append(["--recompute-granularity", "full"])
        rows.append(["--recompute-method", "uniform"])
        rows.append(["--recompute-num-layers", 1])
    return rows


def _find_lost(degrees: PlanDegrees) -> list[str]:
    """Return what Megatron-LM cannot express beside :attr:`PlanDegrees.lost`."""
    plan, found = degrees.plan, []
    expected = INTERLEAVED if degrees.virtual > 1 else ONE_F_ONE_B
    spec = SCHEDULES.get(plan.schedule)
    if degrees.pipeline > 1 and plan.schedule != expected and spec is not None and spec.flushes:
        found.append(f"The schedule {plan.schedule}: Megatron-LM runs {expected}.")
    found += degrees.list_lost_hybrid() if degrees.zero > 1 else []
    found += degrees.list_lost_boundaries()
    if degrees.pipeline > 1 and degrees.layers is not None and find_layout(degrees) is None:
        found.append("Virtual stages in a V: Megatron-LM places them in a loop.")
    if plan.optimizer not in _OPTIMIZERS:
        found.append(f"The optimizer {plan.optimizer}.")
    return found


def looks_like_megatron(text: str) -> bool:
    """Return whether a text has one of Megatron-LM's own options."""
    return any(name in text for name in _TELLING)


def read_megatron(text: str, where: str) -> EngineRun:
    """Return the decisions of Megatron-LM's arguments, as a file or a shell script. FXP407."""
    values = ConfigurationValues(parse_arguments(text, where), where)
    tensor = values.count("tensor_model_parallel_size")
    pipeline = values.count("pipeline_model_parallel_size")
    constraints: dict[str, int | float | str | bool] = {"tp": tensor, "pp": pipeline}
    lost = []
    if (expert := values.count("expert_model_parallel_size")) > 1:
        constraints["ep"] = expert
    if (context := values.count("context_parallel_size")) > 1:
        constraints["cp"] = context
        if values.text("cp_comm_type", "p2p") != "allgather":
            lost.append("Context parallelism is priced with gathered keys and values.")
    constraints["zero"] = _read_zero(values)
    if values.count("num_distributed_optimizer_instances") > 1:
        lost.append("Hybrid sharding is priced as sharding over all data-parallel ranks.")
    full = values.text("recompute_granularity", "none")
    constraints["recompute"] = "selective" if values.flag("recompute_activations") else full
    if values.flag("bf16") or values.flag("fp16"):
        constraints["precision"] = "bf16"
    if pipeline > 1:
        _read_stages(values, constraints, lost)
    rows = values.count("micro_batch_size")
    batch = values.number("global_batch_size")
    return EngineRun(
        constraints, microbatch_rows=rows, batch_size=batch, lost=tuple(lost),
        divide=LayerDivision.of(values).divide,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerDivision:
    """Megatron-LM's options of the division of layers into stages without a layout.

    virtual: stages of a rank; each: layers of a virtual stage, which determine their number. first,
    last: layers of the first and the last rank. embedding, loss: whether they count as a layer.
    Source: ``get_num_layers_to_build``.
    """

    pipeline: int
    virtual: int = 1
    each: int | None = None
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False

    @classmethod
    def of(cls, values: ConfigurationValues) -> LayerDivision:
        """Read the options."""
        return cls(
            pipeline=values.count("pipeline_model_parallel_size"),
            virtual=values.count("num_virtual_stages_per_pipeline_rank"),
            each=values.number("num_layers_per_virtual_pipeline_stage"),
            first=values.number("decoder_first_pipeline_num_layers"),
            last=values.number("decoder_last_pipeline_num_layers"),
            embedding=values.flag("account_for_embedding_in_pipeline_split"),
            loss=values.flag("account_for_loss_in_pipeline_split"),
        )

    def divide(self, layers: int) -> tuple[int, ...]:
        """Return the layers of each stage of the program; () where Megatron-LM refuses."""
        ends = (self.first, self.last)
        middle = self.pipeline - sum(end is not None for end in ends)
        left = layers + self.embedding + self.loss - sum(end or 0 for end in ends)
        share, more = divmod(left, middle) if middle > 0 else (0, left)
        if more or share < 0 or (middle > 0 and not share):
            return ()
        ranks = [share] * self.pipeline
        ranks[0] = share if self.first is None else self.first
        ranks[-1] = ranks[-1] if self.last is None else self.last
        virtual = self.virtual if self.each is None else max(1, ranks[0] // self.each)
        if any(count % virtual for count in ranks):
            return ()
        counts = [count // virtual for count in ranks] * virtual
        counts[0] -= self.embedding
        counts[-1] -= self.loss
        return tuple(counts)


def _count_stages(layout: str) -> int:
    """Return the number of stages of a layout; 0 where it cannot be read."""
    try:
        return len(expand_layout(layout))
    except FxpartError:
        return 0


def _read_zero(values: ConfigurationValues) -> int:
    strategy = values.text("data_parallel_sharding_strategy", "no_shard")
    levels = {name: level for level, name in _SHARDING.items()} | {"optim": 1}
    if values.flag("use_torch_fsdp2"):
        return 3
    if values.flag("use_megatron_fsdp") and strategy in levels:
        return levels[strategy]
    return 1 if values.flag("use_distributed_optimizer") else 0


def _read_stages(
    values: ConfigurationValues, constraints: dict[str, int | float | str | bool], lost: list[str]
) -> None:
    """Read schedule, virtual stages and layout."""
    pipeline = values.count("pipeline_model_parallel_size")
    virtual = values.count("num_virtual_stages_per_pipeline_rank")
    if "num_layers_per_virtual_pipeline_stage" in values:
        virtual = 2  # Their number follows from the model's layers.
    layout = values.text("pipeline_model_parallel_layout")
    parts = _count_stages(layout) if layout else 0
    if parts and parts % pipeline == 0:
        constraints["layout"], virtual = layout, parts // pipeline
    elif layout:
        lost.append("The boundaries in the layout are not priced: it is not one of E, t, m and L, "
                    "or its stages do not divide over the ranks.")  # fmt: skip
    constraints["schedule"] = INTERLEAVED if virtual > 1 else ONE_F_ONE_B
    if virtual > 1:
        constraints["virtual"] = virtual


MEGATRON = EngineSpec(
    name="megatron",
    package="megatron-core",
    version="0.16.1",
    summary="Arguments for the training scripts of Megatron-LM.",
    write=write_megatron,
    read=read_megatron,
    looks_like=looks_like_megatron,
)
