"""Remove dead ops and identities, without changing any bit of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpart.compiler.effects import argument, is_random, packet_name, remove_dead_nodes
from fxpart.compiler.graph_edit import value
from fxpart.compiler.node_annotation import Level


@dataclass(frozen=True)
class SimplifyPass:
    """Remove dead ops without side effects, and ops that return their input.

    Removed: conversions to the current dtype and device, disabled dropout, ``alias``, expansion,
    view and slice to the same shape, contiguous of a contiguous tensor. ``type_as`` becomes a
    conversion to the dtype, which does not read the other tensor. Every bit, stride and gradient is
    preserved.
    """

    name: ClassVar[str] = "simplify"
    requires: ClassVar[Level] = Level.CAPTURED
    ensures: ClassVar[Level] = Level.CAPTURED

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Remove identities, then dead ops."""
        graph = graph_module.graph
        for node in list(graph.nodes):
            check = (
                _IDENTITIES.get(packet_name(node.target)) if node.op == "call_function" else None
            )
            if node.target is torch.ops.aten.type_as.default:
                _convert_without_example(node)
            if check is None or not check(node):
                continue
            source = node.args[0]
            if isinstance(source, fx.Node) and _same_tensor(node, source):
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        remove_dead_nodes(graph)
        return graph_module


def _convert_without_example(node: fx.Node) -> None:
    """Write ``x.type_as(y)`` as ``x.to(dtype)``, whatever the shape of y."""
    source, example = node.args
    if value(source).device == value(example).device:
        node.target = torch.ops.aten.to.dtype
        node.args = (source, value(example).dtype)


def _same_tensor(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two values have equal shape, strides, dtype and device."""
    x, y = value(a), value(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (
        x.dtype == y.dtype
        and x.device == y.device
        and _equal(tuple(x.shape), tuple(y.shape))
        and _equal(x.stride(), y.stride())
    )


def _equal(a: tuple[int | torch.SymInt, ...], b: tuple[int | torch.SymInt, ...]) -> bool:
    """Compare sizes as expressions, without a guard."""
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def _always(node: fx.Node) -> bool:
    """Accept an op that always returns its input's values."""
    return True


def _not_copied(node: fx.Node) -> bool:
    """Accept a conversion that is not required to copy."""
    return not argument(node, "copy", False)


def _switched_off(node: fx.Node) -> bool:
    """Accept disabled dropout; with p=0 in training it also returns its input."""
    return not is_random(node)


_IDENTITIES: dict[str, Callable[[fx.Node], bool]] = {
    "aten.to": _not_copied,
    "aten.type_as": _always,
    "aten.alias": _always,
    "aten.expand": _always,
    "aten.expand_as": _always,
    "aten.slice": _always,
    "aten.view": _always,
    "aten.reshape": _always,
    "aten.view_as": _always,
    "aten.reshape_as": _always,
    "aten.contiguous": _always,
    "aten.dropout": _switched_off,
    "aten.feature_dropout": _switched_off,
    "aten.alpha_dropout": _switched_off,
    "aten.feature_alpha_dropout": _switched_off,
}
