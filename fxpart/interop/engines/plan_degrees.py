"""The decisions of a plan in the terms that training engines share: one degree for all stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.plan.constraint_table import CONTEXT_AXIS, DATA_AXES
from fxpart.plan.model import Plan, Stage
from fxpart.schedule.spec import SCHEDULES
from fxpart.sharding.mesh import Mesh
from fxpart.solver.joint.constraints.block_names import find_layer_blocks

# Degrees of data, tensor, expert and context parallelism, ZeRO level, recompute, shard degree.
_Degrees = tuple[int, int, int, int, int, str, int]


@dataclass(frozen=True, kw_only=True)
class PlanDegrees:
    """A plan as one mesh of pipeline, data and tensor ranks.

    Degrees that differ between stages are those of most stages. pipeline: number of stages.
    shards: data-parallel ranks over which ZeRO shards: 1 without ZeRO, all unless hybrid.
    virtual: stages of the program per rank. microbatch_rows: rows of a microbatch on one
    data-parallel rank. layers: by stage of the program, its transformer layers, as (first, end);
    None where the names of the blocks are not known, or the model has no stack of layers. inside:
    the stages of the program that begin within a layer. sequence: length of the inputs, if it is
    known. lost: what no engine of this kind can express.
    """

    plan: Plan
    data: int
    tensor: int
    expert: int
    context: int
    pipeline: int
    zero: int
    shards: int
    recompute: str
    virtual: int
    microbatches: int
    microbatch_rows: int
    layers: tuple[tuple[int, int], ...] | None
    inside: tuple[int, ...]
    sequence: int | None
    lost: tuple[str, ...]

    @property
    def world(self) -> int:
        """The number of ranks of the engine."""
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def rows(self) -> int:
        """The rows of the global batch that the engine computes per step."""
        return self.microbatch_rows * self.microbatches * self.data

    @property
    def layer_count(self) -> int | None:
        """The number of layers of the model, if it is known."""
        return self.layers[-1][1] if self.layers else None

    @property
    def has_equal_stages(self) -> bool:
        """Whether every stage of the program has the same number of layers."""
        return self.layers is not None and len({end - first for first, end in self.layers}) == 1

    @property
    def ranks_per_host(self) -> tuple[int, int]:
        """The hosts of the plan's ranks, and the most ranks on one of them."""
        hosts = Counter(self.plan.device(rank).host for rank in range(self.plan.world))
        count = max(len(hosts), 1)
        return count, -(-self.world // count)

    @property
    def shard_replicas(self) -> int:
        """The number of data-parallel groups that each have all parts of ZeRO's state."""
        return self.data // self.shards

    def list_lost_hybrid(self) -> list[str]:
        """Return the sentence of an engine that shards over all data-parallel ranks or none."""
        if self.shards in (1, self.data):
            return []
        return [f"Hybrid sharding over {self.shards} of {self.data} data-parallel ranks: "
                "all share one set of shards."]  # fmt: skip

    def list_lost_experts(self, advice: str = "") -> list[str]:
        """Return the sentence of an engine without an option for the experts' degree.

        advice: what to do instead.
        """
        if self.expert == 1:
            return []
        return [f"Expert parallelism of degree {self.expert}{f': {advice}' if advice else ''}."]

    def list_lost_context(self) -> list[str]:
        """Return the sentence of an engine without context parallelism."""
        return [] if self.context == 1 else [f"Context parallelism of degree {self.context}."]

    def list_lost_boundaries(self) -> list[str]:
        """Return sentences on stage boundaries that engines with whole layers cannot express."""
        found = []
        if self.pipeline > 1 and self.layers is None:
            found.append("The stage boundaries: the names of the model's layers are not known.")
        return found + [
            f"The beginning of stage {stage} within a layer: it is moved to the next one."
            for stage in self.inside
        ]


def find_degrees(plan: Plan, blocks: Sequence[str] = ()) -> PlanDegrees:
    """Return the plan's degrees. blocks: the names of the model's blocks, where they are known."""
    stages = [plan.stages[k] for k in plan.firsts]
    kept, _ = Counter(map(_degrees, stages)).most_common(1)[0]
    data, tensor, expert, context, zero, recompute, shards = kept
    parts = data * plan.microbatches
    rows = max(1, plan.batch_size // parts)
    layers, inside = _find_layers(plan, blocks)
    return PlanDegrees(
        plan=plan, data=data, tensor=tensor, expert=expert, context=context, pipeline=len(stages),
        zero=zero, shards=shards, recompute=recompute, virtual=plan.virtual,
        microbatches=plan.microbatches, microbatch_rows=rows, layers=layers, inside=inside,
        sequence=_find_sequence(plan),
        lost=tuple(_find_lost(plan, stages, kept, rows * parts)),
    )  # fmt: skip


def _degrees(stage: Stage) -> _Degrees:
    shards = (stage.shard_degree or stage.data_parallel) if stage.zero else 1
    return (
        stage.data_parallel, stage.tensor_parallel, stage.expert_parallel, stage.context_parallel,
        stage.zero, stage.recompute, shards,
    )  # fmt: skip


def _find_lost(plan: Plan, stages: Sequence[Stage], kept: _Degrees, rows: int) -> list[str]:
    """Return what of the plan an engine with one mesh and synchronous steps cannot express."""
    found = []
    others = [stage for stage in stages if _degrees(stage) != kept]
    if others:
        listed = "; ".join(f"stage {stage.index}: {_describe(_degrees(stage))}" for stage in others)
        found.append(f"Degrees that differ between stages ({listed}): all get {_describe(kept)}.")
    if plan.replicas:
        groups = ", ".join("/".join(map(str, dict.fromkeys(group))) for group in plan.replicas)
        found.append(f"Replicas of single stages (stages {groups}): each stage is there once.")
    if plan.staleness:
        found.append(f"Queues with staleness {', '.join(map(str, plan.staleness))}.")
    spec = SCHEDULES.get(plan.schedule)
    if spec is not None and not spec.flushes:
        found.append(f"The asynchronous pipeline with weights {plan.weights!r}: it is flushed.")
    if plan.devices:
        listed = ", ".join(plan.device(rank).name for rank in range(min(plan.world, 8)))
        found.append(f"The choice of devices ({listed}{', ...' if plan.world > 8 else ''}).")
    if plan.order:
        found.append("The order of the blocks, which differs from that of the model.")
    if any(target - source != 1 for source, target, _ in plan.stage_edges) and not plan.replicas:
        found.append("Transfers that skip a stage.")
    if plan.transfer_dtype:
        found.append(f"Transfers in {plan.transfer_dtype}: they have the dtype of the activations.")
    if plan.offload != "none":
        found.append(f"Offload {plan.offload!r}: everything is in the devices' memory.")
    if rows != plan.batch_size:
        found.append(f"Microbatches of different sizes: the batch is {rows} and not "
                     f"{plan.batch_size} rows.")  # fmt: skip
    found += _find_lost_axes(plan)
    placed = plan.sharding.placed if plan.sharding is not None else ()
    if placed and kept[1] > 1:
        found.append(f"The placements of {len(placed)} groups of tensors: the engine has its own.")
    return found


def _find_lost_axes(plan: Plan) -> list[str]:
    """Return a sentence for each axis of the mesh that engines do not have."""
    axes = Mesh.parse(plan.sharding.mesh).axes if plan.sharding is not None else ()
    return [
        f"The mesh axis {name}={size}: its ranks count as tensor-parallel ones."
        for name, size in axes
        if name not in (*DATA_AXES, "tp", CONTEXT_AXIS) and size > 1
    ]


def _describe(degrees: _Degrees) -> str:
    data, tensor, expert, context, zero, recompute, shards = degrees
    words = [f"dp{data}", f"tp{tensor}", f"zero{zero}", f"recompute {recompute}"]
    words += [f"shard{shards}"] if zero and shards < data else []
    words += [f"cp{context}"] if context > 1 else []
    return " ".join(words + ([f"ep{expert}"] if expert > 1 else []))


def _find_sequence(plan: Plan) -> int | None:
    """Return the second dim of the first integer input with a batch dim."""
    for given in plan.model.inputs:
        if given.dtype.startswith("int") and given.batch_dim == 0 and len(given.shape) == 2:
            length = given.shape[1]
            return length if isinstance(length, int) else None
    return None


def _find_layers(
    plan: Plan, blocks: Sequence[str]
) -> tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...]]:
    """Return the layers of each stage of the program, and the stages that begin within a layer.

    A layer belongs to the stage in which it begins.
    """
    if len(blocks) != plan.model.blocks or plan.order or plan.replicas:
        return None, ()
    found = find_layer_blocks(blocks)
    if not found:
        return None, ()
    begins = [first for first, _ in found]
    layers, inside = [], []
    for number, (first, last, _) in enumerate(plan.program_stages):
        own = [index for index, begin in enumerate(begins) if first <= begin <= last]
        before = sum(begin < first for begin in begins)
        layers.append((own[0], own[-1] + 1) if own else (before, before))
        if any(start < first <= end for start, end in found):
            inside.append(number)
    return tuple(layers), tuple(inside)
