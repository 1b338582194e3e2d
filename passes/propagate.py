"""Propagate annotated placements through the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpart.compiler.node_annotation import MESH_KEY, Level
from fxpart.errors import error
from fxpart.sharding import Mesh

from .propagation.axis_propagation import propagate_axes
from .propagation.axis_rules import GraphRules
from .propagation.finalization import decide_forced, write
from .propagation.propagation_graph import build_propagation_graph


@dataclass(frozen=True)
class PropagatePass:
    """Propagate placements forward and backward along the factors of the ops' rules.

    Axes are propagated separately, the major one first; annotated inputs take priority; ops that
    keep all factors (pointwise, views, norms) precede ops that compute. If two factors of an op
    compete for an axis, a neighboring annotation takes priority, then fewer reshard bytes. Earlier
    placements never change. What nothing decides stays undecided, or is replicated with ``close``.
    Raise FXP109 without a mesh.
    """

    close: bool = False
    name: ClassVar[str] = "propagate"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set NodeAnnotation.sharding of every node with tensors."""
        mesh = graph_module.meta.get(MESH_KEY)
        if not isinstance(mesh, Mesh):
            why = "the graph has no mesh"
            fix = 'run annotate{mesh="dp=2,tp=2",seeds="{}"} first'
            raise error("FXP109", where="pass propagate", why=why, fix=fix)
        rules = GraphRules(mesh)
        ops = build_propagation_graph(graph_module, rules)
        propagate_axes(ops, range(len(mesh.axes)), rules)
        decide_forced(ops, len(mesh.axes), close=self.close)
        write(ops, mesh)
        return graph_module
