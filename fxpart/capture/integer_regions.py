"""Regions without gradients whose results are masks or integers, which have none anyway.

``with torch.no_grad(): mask = one_hot(...)`` is a graph of its own to torch.export. Its operations
become operations of the graph around it, so that the rows that the mask selects are known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from fxpart.compiler.effects import list_written_nodes, packet_name
from fxpart.compiler.graph_edit import value


def inline_integer_regions(module: fx.GraphModule) -> None:
    """Inline regions that compute only integers and masks, write nothing, and call no region."""
    graph, changed = module.graph, False
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled":
            continue
        inner = getattr(module, str(node.args[1].target))
        if not _is_plain(inner.graph):
            continue
        given = iter(node.args[2:])
        copies = {n: next(given) for n in inner.graph.nodes if n.op == "placeholder"}
        with graph.inserting_before(node):
            result = graph.graph_copy(inner.graph, copies)
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(node)
        changed = True
    if changed:
        graph.lint()


def select_by_constants(exported: ExportedProgram) -> None:
    """Write ``x[index]`` with a constant index of one element [1] as a slice."""
    graph = exported.graph_module.graph
    constants = {
        spec.arg.name: exported.constants.get(str(spec.target))
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        source, indices = node.args
        *before, index = indices
        constant = constants.get(getattr(_unlifted(index), "name", ""))
        if any(i is not None for i in before) or constant is None:
            continue
        if list(constant.shape) != [1] or constant.dtype not in _WIDE:
            continue
        at = int(constant)
        if at >= 0:
            with graph.inserting_before(node):
                found = graph.call_function(
                    torch.ops.aten.slice.Tensor, (source, len(before), at, at + 1)
                )
            found.meta = dict(node.meta)
            node.replace_all_uses_with(found)
            graph.erase_node(node)


_WIDE = (torch.int64, torch.int32)


def _unlifted(node: Any) -> Any:
    """Return the placeholder of a constant that forward makes and does not write."""
    while isinstance(node, fx.Node) and packet_name(node.target) in _LIFTS:
        node = node.args[0]
    return node


_LIFTS = ("aten.lift_fresh_copy", "aten.detach_", "aten.detach")


def _is_plain(graph: fx.Graph) -> bool:
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    if not all(n.op == "call_function" and not list_written_nodes(n) for n in calls):
        return False
    output = graph.output_node().args[0]
    if not isinstance(output, tuple | list) or any(
        isinstance(n.target, torch._ops.HigherOrderOperator) for n in calls
    ):
        return False
    return all(isinstance(n, fx.Node) and _is_integer(value(n)) for n in output)


def _is_integer(held: object) -> bool:
    if isinstance(held, torch.Tensor):
        return not (held.is_floating_point() or held.is_complex())
    return isinstance(held, int | torch.SymInt)
