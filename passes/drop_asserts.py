"""Remove what only checks shapes and values that capture has settled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpart.compiler.effects import is_assert
from fxpart.compiler.graph_verifier import is_size
from fxpart.compiler.node_annotation import Level


@dataclass(frozen=True)
class DropAssertsPass:
    """Erase ``_assert_tensor_metadata``, ``_assert_scalar``, ``sym_constrain_range`` and the like.

    The size computations that only these used go too; every other op stays.
    """

    name: ClassVar[str] = "drop_asserts"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Erase them in the graph and in the graphs of its regions."""
        for inner in graph_module.modules():
            if isinstance(inner, fx.GraphModule):
                _clean(inner.graph)
        return graph_module


def _clean(graph: fx.Graph) -> None:
    """One graph: asserts, then the sizes that are left without a user."""
    for node in reversed(graph.nodes):
        unused_size = node.op == "call_function" and not node.users and is_size(node)
        if is_assert(node) or unused_size:
            graph.erase_node(node)
