"""Reject tensors with data-dependent sizes and numbers with data-dependent values.

They cannot be planned, and tracing on real tensors would fix the sizes of one example.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpart.capture.source_locations import source_line
from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.effects import is_op
from fxpart.errors import FxpartError, Problem

# Composite ops without such a tag, which call nonzero.
_UNTAGGED = frozenset({"aten.where.default", "aten.nonzero_numpy.default", "aten.argwhere.default"})
_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def refuse_data_sizes(graph: fx.Graph, *, recorded: bool) -> None:
    """Raise FXP108, one problem per source line, for every op with a data-dependent size.

    recorded: whether the graph was recorded on real tensors. Sizes are then numbers, so the op type
    decides; otherwise the symbols do.
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
            "use fixed sizes: torch.where or a mask instead of nonzero, unique or .item(); x[mask] "
            "may be summed, averaged, passed to a loss, or assigned to y[mask]"
        )
        problems.setdefault(place, Problem("FXP108", place, why, fix))
    if problems:
        raise FxpartError(problems.values())


def refuse_transforms(graph: fx.Graph) -> None:
    """Raise FXP108, one problem per source line, for torch.vmap, whose ops have a hidden dim."""
    problems: dict[str, Problem] = {}
    for node in graph.nodes:
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith("torch._functorch"):
            place = source_line(node.meta.get("stack_trace")) or node.name
            why = "torch.vmap (or another torch.func transform) in forward cannot be partitioned"
            fix = (
                "write it with an explicit dim: matmul, einsum, or a loop with torch.stack; a "
                "gradient with torch.autograd.grad(..., create_graph=True)"
            )
            problems.setdefault(place, Problem("FXP108", place, why, fix))
    if problems:
        raise FxpartError(problems.values())


def _tells(node: fx.Node) -> bool:
    """Return whether an op has data-dependent results; index only with a boolean index."""
    if not is_op(node.target):
        return False
    if node.target is torch.ops.aten.index.Tensor:
        indices = [i for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
        return any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)
    return str(node.target) in _UNTAGGED or any(tag in node.target.tags for tag in _TAGS)  # type: ignore[union-attr]
