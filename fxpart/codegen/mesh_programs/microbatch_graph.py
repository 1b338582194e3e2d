"""Graphs for several microbatches: totals of the batch become inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.passes.objective import (
    REPEAT_KEY,
    STEP_STATE_KEY,
    WEIGHT_KEY,
    analyze,
    coupling_of,
    divide,
    repetition_of,
    weight_of,
)

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel


def batch_dims(captured: CapturedModel) -> Mapping[str, int | None]:
    """Return the batch dim of each input of the graph, by placeholder name."""
    return {given.name: given.batch_dim for given in captured.inputs}


def divide_graph(
    graph: fx.GraphModule, captured: CapturedModel, microbatches: int, *, outputs: bool = False
) -> fx.GraphModule:
    """Return the graph for this number of microbatches; unchanged for 1 or a mean over rows.

    Also record, in the captured graph, the weight of a batch in a mean over batches, whether its
    rows may be repeated, and state that is written per step. outputs: the program returns the
    user's outputs.
    """
    known, dims = WEIGHT_KEY in captured.graph.meta, batch_dims(captured)
    if known and microbatches == 1:
        return graph
    found = analyze(graph, dims, accept=True)
    if not known:
        captured.graph.meta[WEIGHT_KEY] = weight_of(graph, found)
        captured.graph.meta[REPEAT_KEY] = repetition_of(graph, dims, outputs=outputs)
        given = captured.loss_kind != "mean-square"
        if found.writers and not coupling_of(analyze(graph, dims), loss=given):
            names = {name for written in found.writers.values() for name in written}
            captured.graph.meta[STEP_STATE_KEY] = tuple(sorted(names))
    return graph if microbatches == 1 else divide(graph, found).module


def divide_sharded_graph(
    sharded: ShardedGraph, captured: CapturedModel, microbatches: int, *, outputs: bool = False
) -> ShardedGraph:
    """Apply :func:`divide_graph` to a graph with placements."""
    whole = divide_graph(sharded.whole, captured, microbatches, outputs=outputs)
    return (
        sharded if whole is sharded.whole else replace(sharded, whole=whole, costs={}, _locals={})
    )
