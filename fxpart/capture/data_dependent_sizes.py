"""Tensors whose size, or numbers whose value, depends on data: found in a graph and refused.

Nothing can be planned for them, and a recording on real tensors would bake in one example's sizes.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpart.capture.source_locations import source_line
from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.effects import is_op
from fxpart.errors import FxpartError, Problem

# Composite ops without such a tag: they call nonzero.
_UNTAGGED = frozenset({"aten.where.default", "aten.nonzero_numpy.default", "aten.argwhere.default"})
_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def refuse_data_sizes(graph: fx.Graph, *, recorded: bool) -> None:
    """FXP108, one problem per source line, for every op whose result's size depends on data.

    recorded: whether the graph was recorded on real tensors; there, sizes are numbers and the ops
    tell; otherwise the symbols do.
    """
    problems: dict[str, Problem] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not (_tells(node) if recorded else has_unbacked_symbols(node.meta.get("val"))):
            continue
        place = source_line(node.meta.get("stack_trace")) or node.name
        why = f"the result of {node.target} has a size or value that depends on data"
        fix = (
            "keep sizes fixed: torch.where or a mask instead of indexing with a condition, "
            "nonzero, unique or .item()"
        )
        problems.setdefault(place, Problem("FXP108", place, why, fix))
    if problems:
        raise FxpartError(problems.values())


def refuse_transforms(graph: fx.Graph) -> None:
    """FXP108, one problem per source line, for torch.vmap: its ops see a dim that no value has."""
    problems: dict[str, Problem] = {}
    for node in graph.nodes:
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith("torch._functorch"):
            place = source_line(node.meta.get("stack_trace")) or node.name
            why = "torch.vmap (or another transform of torch.func) in forward cannot be divided"
            fix = "write it with a dim of its own: matmul, einsum or a loop with torch.stack"
            problems.setdefault(place, Problem("FXP108", place, why, fix))
    if problems:
        raise FxpartError(problems.values())


def _tells(node: fx.Node) -> bool:
    """Whether an op is one with data-dependent results; index is, with a boolean index alone."""
    if not is_op(node.target):
        return False
    if node.target is torch.ops.aten.index.Tensor:
        indices = [i for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
        return any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)
    return str(node.target) in _UNTAGGED or any(tag in node.target.tags for tag in _TAGS)  # type: ignore[union-attr]
