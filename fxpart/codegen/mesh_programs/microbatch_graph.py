"""Graphs of several microbatches: totals of the batch become inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
from fxpart.passes.objective import REPEAT_KEY, WEIGHT_KEY, divide, repetition_of, weight_of

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel


def batch_dims(captured: CapturedModel) -> Mapping[str, int | None]:
    """The batch dim of each input of the graph, by its placeholder."""
    return {given.name: given.batch_dim for given in captured.inputs}


def divide_graph(
    graph: fx.GraphModule, captured: CapturedModel, microbatches: int, *, outputs: bool = False
) -> fx.GraphModule:
    """The graph for so many microbatches; itself for one, and where the loss is a mean of rows.

    Notes on the captured graph what a batch weighs in a mean over batches, and whether its rows may
    be repeated. outputs: the program gives the user's outputs.
    """
    if WEIGHT_KEY not in captured.graph.meta:
        dims = batch_dims(captured)
        captured.graph.meta[WEIGHT_KEY] = weight_of(graph, dims)
        captured.graph.meta[REPEAT_KEY] = repetition_of(graph, dims, outputs=outputs)
    if microbatches == 1:
        return graph
    return divide(graph, batch_dims(captured), accept=True).module


def divide_sharded_graph(
    sharded: ShardedGraph, captured: CapturedModel, microbatches: int, *, outputs: bool = False
) -> ShardedGraph:
    """The same for a graph whose placements over a mesh are decided."""
    whole = divide_graph(sharded.whole, captured, microbatches, outputs=outputs)
    return sharded if whole is sharded.whole else replace(sharded, whole=whole, _locals={})
