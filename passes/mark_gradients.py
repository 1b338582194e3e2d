"""Determine which values require a gradient, and what autograd saves for each op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpart.compiler.collective_calls import find_regathered
from fxpart.compiler.graph_edit import annotate, annotation, fake_mode
from fxpart.compiler.node_annotation import Level, SavedTensor
from fxpart.compiler.op_behavior import StorageAnalysis


@dataclass(frozen=True)
class MarkGradientsPass:
    """Set ``NodeAnnotation.requires_grad`` on every value, ``saved`` and ``working`` on every op.

    Each distinct op (same arguments, shapes, strides and gradients) runs once on fake tensors with
    ``torch.autograd.graph.saved_tensors_hooks``; equal ops share the result, so 96 equal layers
    cost as much as one. Parameters and buffers are not counted. Sizes are whole storages in bytes,
    sympy expressions for a symbolic batch.
    """

    name: ClassVar[str] = "mark_gradients"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Annotate all nodes in one walk."""
        walk = StorageAnalysis(graph_module, fake_mode(graph_module.graph))
        for node in graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                walk.start(node)
            elif node.op == "call_function":
                kept = [home for home in walk.call(node) if not home.state]
                annotate(
                    node,
                    saved=tuple(SavedTensor(h.number, h.size, h.source) for h in kept),
                    working=walk.working(node),
                )
            if node.op != "output":
                annotate(node, requires_grad=any(part.grad for part in walk.parts[node]))
        _separate_regathered(graph_module.graph)
        return graph_module


def _separate_regathered(graph: fx.Graph) -> None:
    """Move the gathered parameters that the backward gathers again out of ``saved``."""
    names = {node.name for node in find_regathered(graph)}
    for node in graph.nodes if names else ():
        saved = annotation(node).saved
        again = tuple(tensor for tensor in saved if tensor.source in names)
        if again:
            kept = tuple(tensor for tensor in saved if tensor.source not in names)
            annotate(node, saved=kept, regathered=again)
