"""Rank-local captured model: the model with the local shapes of one mesh rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

import torch
from torch import fx

from fxpart.capture.captured_model import CapturedModel
from fxpart.codegen.size_expressions import dim_text
from fxpart.compiler import MESH_KEY, RNG_KEY
from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.node_annotation import PARTIAL_KEY
from fxpart.program.spec import InputSpec, ShardingSpec, StateSharding
from fxpart.sharding import REPLICATE, Mesh, Placements, Shard, format_placements


def build_local_capture(captured: CapturedModel, local_graph: fx.GraphModule) -> CapturedModel:
    """Return the captured model with the local shapes of inputs and state and the local batch size.

    State that the graph reads is on the meta device; other state is unchanged. The result cannot be
    run or captured again; use the whole model for that.
    """
    nodes = _inputs(captured, local_graph)
    inputs = tuple(replace_shape(spec, nodes[spec.name].meta["val"]) for spec in captured.inputs)
    state = dict(captured.state)
    for name in _state(local_graph):
        held: torch.Tensor = attrgetter(name)(local_graph)
        state[name] = held
    parts = rows_cut(captured, local_graph)
    size = captured.microbatch_size
    return replace(
        captured,
        graph=local_graph,
        inputs=inputs,
        state=state,
        batch_size=max(1, captured.batch_size // parts),
        microbatch_size=None if size is None else max(1, size // parts),
        again=None,
        eager=None,
        example=None,
    )


def sharding_spec(
    captured: CapturedModel, local_graph: fx.GraphModule, zero: int = 0, zero_axis: str = ""
) -> ShardingSpec:
    """Return the sharding of the whole model over the mesh of the local graph.

    captured: the whole model. zero, zero_axis: as in :class:`~fxpart.program.ShardingSpec`.
    """
    mesh: Mesh = local_graph.meta[MESH_KEY]
    partial: Mapping[str, tuple[str, ...]] = local_graph.meta[PARTIAL_KEY]
    nodes = _inputs(captured, local_graph)
    return ShardingSpec(
        mesh=str(mesh),
        inputs=captured.inputs,
        placements={name: _text(node, mesh) for name, node in nodes.items()},
        state={
            name: StateSharding(
                shape=tuple(captured.state[name].shape),
                placements=_text(node, mesh),
                partial=partial.get(name, ()),
            )
            for name, node in _state(local_graph).items()
        },
        zero=zero,
        zero_axis=zero_axis,
    )


def rows_cut(captured: CapturedModel, local_graph: fx.GraphModule) -> int:
    """Return the number of parts into which the mesh shards the rows of a batch."""
    mesh: Mesh = local_graph.meta[MESH_KEY]
    nodes = _inputs(captured, local_graph)
    found = 1
    for spec in captured.inputs:
        parts = 1
        for placement, size in zip(placements_of(nodes[spec.name]), mesh.shape, strict=True):
            if isinstance(placement, Shard) and placement.dim == spec.batch_dim:
                parts *= size
        found = max(found, parts)
    return found


def placements_of(node: fx.Node) -> Placements:
    """Return the placements of an input or state tensor of a local graph."""
    known = annotation(node).sharding
    assert known is not None, f"{node.name} has no sharding"
    return known.results[0]


def replace_shape(spec: InputSpec, value: torch.Tensor) -> InputSpec:
    """Return the input with the shape of a (fake) tensor."""
    return InputSpec(
        name=spec.name,
        path=spec.path,
        dtype=spec.dtype,
        shape=tuple(dim_text(size) for size in value.shape),
        batch_dim=spec.batch_dim,
    )


def _inputs(captured: CapturedModel, local_graph: fx.GraphModule) -> dict[str, fx.Node]:
    """Return the user's inputs by name, in order."""
    nodes = [n for n in local_graph.graph.find_nodes(op="placeholder") if n.name != RNG_KEY]
    nodes = nodes[: len(captured.inputs)]  # totals of the batch follow
    return {spec.name: node for spec, node in zip(captured.inputs, nodes, strict=True)}


def _state(local_graph: fx.GraphModule) -> dict[str, fx.Node]:
    """Return the state that the graph reads, by name."""
    return {str(n.target): n for n in local_graph.graph.find_nodes(op="get_attr")}


def _text(node: fx.Node, mesh: Mesh) -> str:
    """Format placements, leaving out replicated axes."""
    held = placements_of(node)
    return format_placements(tuple(None if p == REPLICATE else p for p in held), mesh)
