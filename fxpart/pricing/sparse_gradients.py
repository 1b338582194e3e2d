"""Memory of sparse gradients of embedding tables: the rows of a step, and their indices."""

from __future__ import annotations

from math import prod

from torch import fx

from fxpart.compat import size_hint
from fxpart.compiler.graph_edit import value
from fxpart.compiler.sparse_lookups import sparse_tables
from fxpart.solver.problem import SPARSE_COPIES

_PLACE = 8  # bytes of a row index


def touched_bytes(graph: fx.Graph) -> dict[str, int]:
    """Return the gradient bytes of tables that are looked up with ``sparse=True``, by name.

    For the rows of the example batch, with repeated ids: torch concatenates the rows of
    microbatches. They do not depend on the table's number of rows.
    """
    found: dict[str, int] = {}
    tables = sparse_tables(graph)
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in tables:
            table = value(node)
            row = prod(map(int, table.shape[1:])) * table.element_size() + _PLACE
            count = sum(
                prod(size_hint(size) for size in value(ids).shape)
                for ids in tables[str(node.target)]
            )
            found[str(node.target)] = SPARSE_COPIES * count * row
    return found


def find_large_embedding_tables(graph: fx.Graph) -> list[str]:
    """Return tables with sparse gradients that are more than an eighth of all state.

    Replicated tables cost a rank no time, only memory.
    """
    tables = sparse_tables(graph)
    sizes = {
        str(node.target): prod(map(int, value(node).shape)) * value(node).element_size()
        for node in graph.nodes
        if node.op == "get_attr"
    }
    return [name for name in tables if 8 * sizes[name] > sum(sizes.values())]
