"""Remove ops that only assert shapes and values that capture has checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpart.compiler.effects import is_assert
from fxpart.compiler.graph_verifier import is_size
from fxpart.compiler.node_annotation import Level


@dataclass(frozen=True)
class DropAssertsPass:
    """Erase assertion ops such as ``_assert_tensor_metadata`` and ``sym_constrain_range``.

    Size computations that only these ops used are removed too; every other op remains.
    """

    name: ClassVar[str] = "drop_asserts"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Erase the asserts in the graph and in the graphs of its regions."""
        for inner in graph_module.modules():
            if isinstance(inner, fx.GraphModule):
                _clean(inner.graph)
        return graph_module


def _clean(graph: fx.Graph) -> None:
    """Erase the asserts of one graph, then the unused size computations."""
    for node in reversed(graph.nodes):
        unused_size = node.op == "call_function" and not node.users and is_size(node)
        if is_assert(node) or unused_size:
            graph.erase_node(node)
