"""Stages on a smaller mesh than that of the program: its minor axes are replicated there.

All work of such a stage is replicated over the axes that its mesh does not have, so that one rank
computes for all mesh ranks along them. What it receives is replicated in the stage that sends it,
and gradients of what it sends are complete in the stage that receives it.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from torch import fx

from fxpart.annotations.graph_values import sharding
from fxpart.codegen.evaluation_stages import assign_like
from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.codegen.stage_assignment import STAGES_KEY, stages_of
from fxpart.compiler import LEVEL_KEY, Level
from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.graph_edit import annotate, annotation, fork
from fxpart.compiler.node_annotation import WHOLE_KEY, NodeSharding
from fxpart.errors import FxpartError, Problem, error
from fxpart.program.spec import ProgramSpec
from fxpart.sharding import REPLICATE, Mesh

Axes = frozenset[int]
NO_AXES: Axes = frozenset()


def find_replicated_axes(mesh: Mesh, ranks: int) -> Axes:
    """Return the minor axes of the mesh over which a stage of so many ranks is replicated."""
    found: set[int] = set()
    left = mesh.size
    for axis in reversed(range(len(mesh.axes))):
        if left == ranks:
            break
        left //= mesh.shape[axis]
        found.add(axis)
    assert left == ranks, "a plan's check compares the ranks of stages with the mesh"
    return frozenset(found)


def place_on_stages(
    sharded: ShardedGraph,
    stage_ranks: Sequence[int],
    starts: Sequence[int],
    order: Sequence[int] = (),
) -> ShardedGraph:
    """Return the graph with the work of each stage replicated over the axes that it lacks.

    starts: first block of each stage, counted in ``order``, which is empty for the graph's order.
    """
    axes = [find_replicated_axes(sharded.mesh, ranks) for ranks in stage_ranks]
    position = {block: at for at, block in enumerate(order)}
    axes_of: dict[str, Axes] = {}
    for node in sharded.whole.graph.nodes:
        block = annotation(node).block
        if block is not None:
            axes_of[node.name] = axes[bisect_right(starts, position.get(block, block)) - 1]
    return replicate_on_stages(sharded, axes_of)


def replicate_on_stages(sharded: ShardedGraph, axes_of: Mapping[str, Axes]) -> ShardedGraph:
    """Return the graph with all work of some stages replicated over the axes that they lack.

    axes_of: by name of an op, the axes over which its stage is replicated. State and inputs of such
    stages are replicated over them everywhere, because all stages share one placement of each.
    """
    whole = fork(sharded.whole)
    state: dict[str, Axes] = {}
    for node in whole.graph.find_nodes(op="get_attr"):
        state[str(node.target)] = state.get(str(node.target), NO_AXES) | _of_users(node, axes_of)
    kept: dict[str, Axes] = {}
    for node in whole.graph.nodes:
        own = axes_of.get(node.name, NO_AXES)
        if node.op == "get_attr":
            own = state[str(node.target)]
        elif node.op == "placeholder":
            own = _of_users(node, axes_of)
        known, received = sharding(node), own | _of_users(node, axes_of)
        if received:
            kept[node.name] = received
        if known is not None and received:
            annotate(node, sharding=_replicated(known, own, received))
    whole.meta[WHOLE_KEY] = kept
    return replace(sharded, whole=whole, certificate=None, costs={}, _locals={})


def _of_users(node: fx.Node, axes_of: Mapping[str, Axes]) -> Axes:
    """Return the axes over which stages that read a value, or its items, are replicated."""
    found = frozenset(axis for user in node.users for axis in axes_of.get(user.name, NO_AXES))
    items = [user for user in node.users if user.target is operator.getitem]
    return found.union(*(_of_users(item, axes_of) for item in items))


def _replicated(known: NodeSharding, own: Axes, received: Axes) -> NodeSharding:
    """Return a sharding without strategy on ``own`` axes, with whole results on ``received``."""
    return replace(
        known,
        strategy=tuple("" if axis in own else s for axis, s in enumerate(known.strategy)),
        results=tuple(
            tuple(REPLICATE if axis in received else p for axis, p in enumerate(result))
            for result in known.results
        ),
        origins=tuple("" if axis in received else o for axis, o in enumerate(known.origins)),
    )


def place_evaluation(
    train: fx.GraphModule, sharded: ShardedGraph, stage_ranks: Sequence[int]
) -> ShardedGraph:
    """Return an evaluation graph with the stages of ``train``, replicated on these as in training.

    Each op of its local graphs has a stage: collectives that of the op that they serve.
    """
    axes = [find_replicated_axes(sharded.mesh, ranks) for ranks in stage_ranks]
    whole = fork(sharded.whole)
    nodes = {node.name: node for node in whole.graph.nodes}
    axes_of = {}
    for node, stage in stages_of(assign_like(train, whole).graph).items():
        annotate(nodes[node.name], stage=stage)
        axes_of[node.name] = axes[stage]
    return replicate_on_stages(replace(sharded, whole=whole), axes_of)


def as_assigned(local: fx.GraphModule, stages: int) -> fx.GraphModule:
    """Return a local graph of :func:`place_evaluation` as one with assigned stages."""
    assigned = fork(local)
    assigned.meta |= {LEVEL_KEY: Level.ASSIGNED, STAGES_KEY: stages}
    return assigned


def with_stage_ranks(spec: ProgramSpec, mesh: Mesh, stage_ranks: Sequence[int]) -> ProgramSpec:
    """Return the program with the number of ranks of stages on a smaller mesh."""
    stages = tuple(
        stage if ranks == mesh.size else msgspec.structs.replace(stage, ranks=ranks)
        for stage, ranks in zip(spec.stages, stage_ranks, strict=True)
    )
    return msgspec.structs.replace(spec, stages=stages)


def check_stage_meshes(
    local: fx.GraphModule, spec: ProgramSpec, mesh: Mesh, stage_ranks: Sequence[int]
) -> None:
    """Raise FXP303 where a stage shards or communicates over an axis that its mesh does not have.

    local: the graph of a mesh rank with stages. One rank would then compute only a part. FXP109 for
    sparse gradients, whose rows are exchanged between stages of equal meshes.
    """
    sparse = sorted({s.name for stage in spec.stages for s in stage.state if s.sparse})
    if sparse:
        raise error(
            "FXP109",
            where=f"parameter {sparse[0]}",
            why="its gradient is sparse, and the stages differ in tensor parallelism",
            fix="use one tensor degree for all stages, or an embedding with sparse=False",
        )
    names = {
        stage: {mesh.names[axis] for axis in find_replicated_axes(mesh, ranks)}
        for stage, ranks in enumerate(stage_ranks)
        if ranks < mesh.size
    }
    assert spec.sharding is not None, "a program on a mesh has a sharding"
    found: dict[str, str] = {}
    for node, stage in stages_of(local.graph).items():
        if stage in names and is_collective(node.target) and _words(node.args) & names[stage]:
            found[f"stage {stage}, op {node.name}"] = "it communicates over"
    for stage, axes in names.items():
        for state in spec.stages[stage].state:
            placed = spec.sharding.state.get(state.name)
            if placed and ({*placed.partial} | _words(placed.placements)) & axes:
                found[f"stage {stage}, {state.name}"] = "it or its gradient is divided over"
        for value in spec.stages[stage].inputs:
            if _words(spec.sharding.placements.get(value.name, "")) & axes:
                found[f"stage {stage}, input {value.name}"] = "it is divided over"
    if found:
        raise FxpartError(
            Problem(
                "FXP303",
                where,
                f"{why} an axis of the mesh {mesh} that this stage does not have",
                "create a new plan for this model: fxpart plan TARGET -o plan.json",
            )
            for where, why in found.items()
        )


def _words(item: Any) -> set[str]:
    """Return the words of all texts in an argument, such as names of axes; not of "tp:R"."""
    if isinstance(item, str):
        return {*re.findall(r"\w+", re.sub(r"\w+:R\b", "", item))}
    if isinstance(item, list | tuple):
        return {word for each in item for word in _words(each)}
    return set()
