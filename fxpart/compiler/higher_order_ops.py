"""Regions: calls of higher-order ops, which run a subgraph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxpart.compiler.graph_edit import annotation, describe_node
from fxpart.errors import FxpartError, error

GRAD = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"

_FIXES = {
    "cond": "compute both branches and select with torch.where(condition, a, b), or evaluate the "
    "condition outside the model",
    "while_loop": "use a Python loop with a fixed number of iterations",
    "scan": "use a Python loop over the dim",
    "map_impl": "use torch.vmap, or a Python loop over the dim",
}


def region_name(node: fx.Node) -> str:
    """Return the name of the higher-order op that a node calls; "" for any other node."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "higher_order":
        return ""
    return str(getattr(node.target, "__name__", node.target))


def region_place(call: fx.Node) -> str:
    """Describe where a region is: the location of the call or of its first user."""
    users: Iterator[fx.Node] = iter(call.users)
    first = next(users, None)
    return describe_node(first if not annotation(call).source and first is not None else call)


def check_regions(graph: fx.Graph) -> None:
    """Raise FXP108 for a region other than autocast and gradient-mode regions."""
    for node in graph.nodes:
        if region_name(node) not in ("", GRAD, AUTOCAST):
            raise refused_region(node)


def refused_region(call: fx.Node) -> FxpartError:
    """Return the error for a region that cannot be inlined."""
    name = region_name(call)
    return error(
        "FXP108",
        where=region_place(call),
        why=f"torch.{name} runs a subgraph, which cannot be divided into stages",
        fix=_FIXES.get(name, "rewrite it with plain tensor operations"),
    )
