"""Regions: calls of higher-order ops, which run a graph of their own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxpart.compiler.graph_edit import annotation, describe_node
from fxpart.errors import FxpartError, error

GRAD = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"

_FIXES = {
    "cond": "compute both branches and choose with torch.where(condition, a, b), or decide "
    "outside of the model",
    "while_loop": "use a Python loop with a fixed number of iterations",
    "scan": "use a Python loop over the dim",
    "map_impl": "use torch.vmap, or a Python loop over the dim",
}


def region_name(node: fx.Node) -> str:
    """The name of the higher-order op that a node calls; empty for any other node."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "higher_order":
        return ""
    return str(getattr(node.target, "__name__", node.target))


def region_place(call: fx.Node) -> str:
    """Where a region is: the call's place, or that of its first user."""
    users: Iterator[fx.Node] = iter(call.users)
    first = next(users, None)
    return describe_node(first if not annotation(call).source and first is not None else call)


def check_regions(graph: fx.Graph) -> None:
    """FXP108 for a region that is neither of gradients nor of autocast."""
    for node in graph.nodes:
        if region_name(node) not in ("", GRAD, AUTOCAST):
            raise refused_region(node)


def refused_region(call: fx.Node) -> FxpartError:
    """The error for a region that cannot be made a part of the graph around it."""
    name = region_name(call)
    return error(
        "FXP108",
        where=region_place(call),
        why=f"torch.{name} runs a graph of its own, which cannot be divided into stages",
        fix=_FIXES.get(name, "write the same with plain operations on tensors"),
    )
