"""Complete the placements of a graph from those that are annotated."""

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
    """Carry placements forward and backward along the factors of the ops' rules.

    Each axis by itself, the major one first; from annotated inputs first; ops that hand cuts on
    (pointwise, views, norms) before those that compute anew. Where two factors of an op compete for
    an axis, an annotation beside it counts first, then fewer bytes of reshards. What was placed
    before is never changed; what nothing decides stays open for a later choice, with ``close`` it
    is replicated. FXP109 without a mesh.
    """

    close: bool = False
    name: ClassVar[str] = "propagate"
    requires: ClassVar[Level] = Level.ANNOTATED
    ensures: ClassVar[Level] = Level.ANNOTATED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Set Annotation.sharding of every node that holds tensors."""
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
