"""Which state is written so that its value has to be followed from op to op."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch import fx

from fxpart.compiler.effects import list_written_nodes, packet_name, state_roots, state_written
from fxpart.compiler.functional_ops import METADATA_OPS, functional_form


def followed_state(module: fx.GraphModule) -> frozenset[str]:
    """Names of buffers that are written more than once, through a view, or read beside the write.

    Such writes depend on the storage that values share, which a sharded value does not keep. A
    buffer that one op writes directly, and that nothing else reads, needs no such care; neither can
    a parameter be followed, for its gradient belongs to the tensor itself, nor a buffer of ops that
    write it as a side effect (batch_norm).
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
    """Whether an op writes one piece of state only and has a functional form."""
    targets = list_written_nodes(op)
    plain = packet_name(op.target) == "aten.copy_" or functional_form(op.target) is not None
    single = len(targets) == 1 and len(roots[targets[0]]) == 1
    return plain and single and packet_name(op.target) not in METADATA_OPS


def _readers(graph: fx.Graph, roots: dict[fx.Node, frozenset[str]], name: str) -> Iterator[fx.Node]:
    """The nodes that take a value which may share the state's storage."""
    for node in graph.nodes:
        if any(name in roots[source] for source in node.all_input_nodes):
            yield node
