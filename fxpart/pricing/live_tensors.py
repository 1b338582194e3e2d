"""The peak and the largest tensors of each stage of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import fx

from fxpart.compiler import BLOCKS_KEY
from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.duplicated_ops import add_duplicated_ops, find_duplicated_ops
from fxpart.plan.model import Plan, Stage
from fxpart.pricing.gradient_buckets import PackedGradients, list_buckets
from fxpart.pricing.memory import find_needed_nodes
from fxpart.pricing.recompute_costs import RecomputeCosts, RecomputedBlock
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.pricing.stage_peak import RecomputedStagePeak, StageOps, StagePeak
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows
from fxpart.pricing.weights import trained_names
from fxpart.pricing.workspace import blocks_ahead
from fxpart.schedule.weight_modes import FLUSH
from fxpart.sharding import Mesh
from fxpart.solver.problem import PartitionProblem, Weight
from fxpart.solver.schedule_costs import splits_backward

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel


def with_live_tensors(
    plan: Plan,
    problem: PartitionProblem,
    graph: fx.GraphModule,
    captured: CapturedModel,
    sharing: StageParallelism | None,
) -> Plan:
    """Return the plan with the peak and the largest tensors of each stage that stores its own.

    problem, graph: of one mesh rank. Stages must be runs of blocks in the graph's order, as in
    plans without branches. sharing: where a stage is several ranks.
    """
    shared = sharing or StageParallelism(Mesh())
    rows = captured_rows(captured)
    if captured.symbolic:
        rows = -(-plan.batch_size // shared.rows // plan.microbatches)
    sizes = Sizes(captured, BatchSplit(rows, plan.microbatches), shared.parts)
    specs = Specs(trained_names(captured) if captured.training else ())
    again = any(stage.recompute != "none" for stage in plan.stages)
    recomputed = _recomputed_blocks(graph, specs, sizes) if again else []
    alive, duplicated = find_needed_nodes(graph.graph), find_duplicated_ops(graph.graph)
    nodes = [n for n in graph.graph.nodes if n in alive and annotation(n).block is not None]
    devices = plan.cluster.devices
    shared_memory = len({d.host for d in devices}) == 1 and {d.kind for d in devices} == {"cpu"}
    found = []
    for entry in plan.prediction.ranks:
        stage = plan.stages[entry.stage]
        if splits_backward(plan.schedule):  # Tensors exist until the second half of a backward.
            found.append(entry)
            continue
        weights_of_stage = [
            w for w in problem.weights if set(w.blocks) & set(range(stage.first, stage.last + 1))
        ]
        own = [n for n in nodes if stage.first <= (annotation(n).block or 0) <= stage.last]
        with_duplicates = add_duplicated_ops(own, duplicated)
        mine = [n for n in nodes if n in with_duplicates]
        tied = [w for w in weights_of_stage if w.gradient and not w.sparse and len(w.blocks) > 1]
        entering = [w for w in tied if w.blocks[-1] > stage.last]
        late = shared.zero in (1, 2) or any(w.blocks[0] < stage.first for w in tied) or entering
        ops = StageOps(
            mine, weights_of_stage, specs, sizes,
            _list_buckets(mine, weights_of_stage, stage, shared, shared_memory),
            sum(w.weight for w in entering), entry.memory.sums if late else 0,
            blocks_ahead(plan.cluster),
        )  # fmt: skip
        if stage.recompute == "none":
            peak = StagePeak(ops)
        else:
            numbers = range(stage.first, stage.last + 1)
            peak = RecomputedStagePeak(ops, {n: recomputed[n][stage.recompute] for n in numbers})
        mode = plan.weights if plan.weights != FLUSH else ""
        found.append(peak.with_peak(entry, plan.microbatches, mode))
    prediction = msgspec.structs.replace(plan.prediction, ranks=tuple(found))
    return msgspec.structs.replace(plan, prediction=prediction)


def _list_buckets(
    nodes: Sequence[fx.Node],
    weights: Sequence[Weight],
    stage: Stage,
    shared: StageParallelism,
    shared_memory: bool,
) -> list[PackedGradients]:
    """Return the buckets of the gradients that no other stage contributes to."""
    used = dict.fromkeys(str(n.target) for node in nodes for n in node.all_input_nodes)
    order = {name: index for index, name in enumerate(used)}
    own = [w for w in weights if stage.first <= w.blocks[0] and w.blocks[-1] <= stage.last]
    own.sort(key=lambda w: order.get(w.name, len(order)))
    return list_buckets(own, shared, shared_memory=shared_memory)


def _recomputed_blocks(
    graph: fx.GraphModule, specs: Specs, sizes: Sizes
) -> list[dict[str, RecomputedBlock]]:
    """Return every block by mode of recomputation."""
    sending = {annotation(n).block for n in graph.graph.nodes if is_collective(n.target)}
    blocks = {number for number in sending if number is not None}
    return RecomputeCosts(graph, specs, len(graph.meta[BLOCKS_KEY]), blocks).blocks_at(sizes)
