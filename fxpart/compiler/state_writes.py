"""State whose writes must be tracked functionally from op to op."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch import fx

from fxpart.compiler.effects import list_written_nodes, packet_name, state_roots, state_written
from fxpart.compiler.functional_ops import METADATA_OPS, functional_form


def followed_state(module: fx.GraphModule) -> frozenset[str]:
    """Return the buffers that are written repeatedly, through a view, or that other ops read.

    Such writes rely on shared storage, which sharded values do not keep. A buffer that a single op
    writes directly, and that no other op reads, needs no tracking. A parameter cannot be tracked
    because its gradient belongs to the tensor itself, nor can a buffer that an op writes as a side
    effect (batch_norm).
    """
    graph = module.graph
    roots = state_roots(graph)
    writers: dict[str, list[fx.Node]] = {}
    for node, names in state_written(graph).items():
        for name in names:
            writers.setdefault(name, []).append(node)
    found = set()
    for name, ops in writers.items():
        shared = len(graph.find_nodes(op="get_attr", target=name)) > 1
        if shared or _is_trained(module, name) or not all(_can_follow(op, roots) for op in ops):
            continue
        direct = len(ops) == 1 and list_written_nodes(ops[0])[0].op == "get_attr"
        if not direct or set(_readers(graph, roots, name)) != set(ops):
            found.add(name)
    return frozenset(found)


def _is_trained(module: fx.GraphModule, name: str) -> bool:
    return bool(attrgetter(name)(module).requires_grad)


def _can_follow(op: fx.Node, roots: dict[fx.Node, frozenset[str]]) -> bool:
    """Return whether an op writes only one piece of state and has a functional form."""
    targets = list_written_nodes(op)
    plain = packet_name(op.target) == "aten.copy_" or functional_form(op.target) is not None
    single = len(targets) == 1 and len(roots[targets[0]]) == 1
    return plain and single and packet_name(op.target) not in METADATA_OPS


def _readers(graph: fx.Graph, roots: dict[fx.Node, frozenset[str]], name: str) -> Iterator[fx.Node]:
    """Yield the nodes with an operand that may alias the state."""
    for node in graph.nodes:
        if any(name in roots[source] for source in node.all_input_nodes):
            yield node
