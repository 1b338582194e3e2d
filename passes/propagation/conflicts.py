"""Contradicting annotations: one value, seen through views, with two placements.

A view, transpose or other op without computation passes its operand on, so both are one value. An
op that computes may reshard its operands, so nothing contradicts. A Partial value may be reduced to
any placement. An op with an annotated factor determines the placement of its operand itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from fxpart.annotations.graph_values import find_producer, is_item, list_result_tensors, sharding
from fxpart.annotations.placement_origin import is_annotated, key_of
from fxpart.compiler.effects import packet_name
from fxpart.errors import Problem
from fxpart.sharding import PARTIAL, Placement, Placements, Shard

from ..rules import operands
from .axis_placements import to_whole
from .axis_rules import GraphRules

# Ops that at most copy; views are recognized by their schema.
_COPIES = frozenset(
    {"aten.reshape", "aten.contiguous", "aten.clone", "aten._unsafe_view", "aten.view_copy"}
)


class _ReachedValue(NamedTuple):
    """A value reached from an annotated one through views."""

    node: fx.Node
    result: int
    placement: Placement
    path: tuple[str, ...]


def is_view(node: fx.Node) -> bool:
    """Return whether an op returns the elements of its only tensor in another shape."""
    if node.op != "call_function" or len(operands(node)) != 1:
        return False
    if packet_name(node.target) in _COPIES:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    return all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def conflicts(graph: fx.Graph, rules: GraphRules) -> list[Problem]:
    """Return FXP112 for each pair of annotations that place one value differently."""
    problems: list[Problem] = []
    for node in graph.nodes:
        known = sharding(node)
        if known is None:
            continue
        for axis, origin in enumerate(known.origins):
            if not is_annotated(origin):
                continue
            for index, result in enumerate(known.results):
                placement = to_whole(result, rules.mesh)[axis]
                if placement is not None and placement != PARTIAL:
                    start = _ReachedValue(node, index, placement, (node.name,))
                    problems += _below(start, axis, origin, rules)
    return problems


def _below(start: _ReachedValue, axis: int, origin: str, rules: GraphRules) -> Iterator[Problem]:
    """Follow the views of a value down to annotated ones."""
    todo = [start]
    while todo:
        here = todo.pop()
        for view, placed in _views(here, axis, rules):
            known = sharding(view)
            assert known is not None
            if known.strategy[axis] is not None:
                continue
            for index, mine in enumerate(placed):
                path = (*here.path, view.name)
                stated = _stated(known.results[index], axis, rules)
                if stated is None:
                    todo.append(_ReachedValue(view, index, mine, path))
                elif stated not in (mine, PARTIAL):
                    name = rules.mesh.names[axis]
                    whys = [
                        f"{key_of(origin)!r} requests {name}:{start.placement} of "
                        f"{start.node.name}, which is {name}:{mine} here, but "
                        f"{key_of(known.origins[axis])!r} requests {name}:{stated}",
                        f"ops between them: {', '.join(path)}",
                    ]
                    fix = "remove one of the two, or the axis from one of them"
                    yield Problem("FXP112", view.name, "\n".join(whys), fix)


def _stated(result: Placements, axis: int, rules: GraphRules) -> Placement | None:
    return to_whole(result, rules.mesh)[axis]


def _views(
    here: _ReachedValue, axis: int, rules: GraphRules
) -> Iterator[tuple[fx.Node, list[Placement]]]:
    """Yield the views of a value and their placements; none if a view cannot keep the sharding."""
    for user in _users(here.node, here.result):
        if not is_view(user):
            continue
        if not isinstance(here.placement, Shard):
            yield user, [here.placement] * len(list_result_tensors(user))
            continue
        ruled = rules.of(user)
        cut = ruled.cut(ruled.rule.operands[0], here.placement, axis) if ruled else None
        made = ruled.along(cut, axis) if ruled is not None and cut is not None else None
        if made is not None:
            placed = [result[0] for result in made.results]
            yield user, [p for p in placed if p is not None]


def _users(node: fx.Node, index: int) -> Iterator[fx.Node]:
    """Yield the users of one tensor of a node, through items."""
    for user in node.users:
        if not is_item(user):
            if isinstance(node.meta.get("val"), torch.Tensor):
                yield user
        elif isinstance(user.meta.get("val"), torch.Tensor):
            if find_producer(user)[1] == index:
                yield from user.users
        else:
            yield from _users(user, index)
