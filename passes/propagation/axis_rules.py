"""Rules as propagation asks them: one axis at a time, answers kept for all ops of one signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.sharding import Mesh, Shard

from ..rules import REPLICATED, RuleLayout, ShardingRule, choices, layout, origin, rule_of
from ..rules.sharding_rule import PARTS, Dims, factor_of


class AxisRule:
    """A rule and what it says along one axis or all.

    passes: whether it hands every cut on: no factor that may be cut is lost in a result.
    """

    def __init__(self, rule: ShardingRule, mesh: Mesh) -> None:
        self.rule, self.mesh, self.parts = rule, mesh, mesh.shape
        self._only = [Mesh((("only", parts),)) for parts in self.parts]
        self._along: dict[tuple[str, int], RuleLayout | None] = {}
        self._joint: dict[tuple[str, ...], RuleLayout | None] = {}
        self._order = {name: i for i, name in enumerate(choices(rule))}
        lost = {f for dims in rule.operands for dim in dims for f in dim} - rule.whole
        for dims in rule.results:
            kept = {f for dim in dims for f in dim}
            self.passes = lost <= kept
            if not self.passes:
                break
        else:
            self.passes = bool(rule.results)

    def along(self, name: str, axis: int) -> RuleLayout | None:
        """The layout along one axis, as if there were no other; None if impossible."""
        key = (name, self.parts[axis])
        if key not in self._along:
            self._along[key] = layout(self.rule, (name,), self._only[axis])
        return self._along[key]

    def joint(self, strategy: tuple[str | None, ...]) -> RuleLayout | None:
        """The layout along all axes; open ones cut nothing. None if impossible."""
        names = tuple(name or REPLICATED for name in strategy)
        if names not in self._joint:
            self._joint[names] = layout(self.rule, names, self.mesh)
        return self._joint[names]

    def feasible(self, name: str, axis: int, strategy: list[str | None]) -> bool:
        """Whether the axis may take this strategy beside those of the others."""
        if self.along(name, axis) is None:
            return False
        return self.joint((*strategy[:axis], name, *strategy[axis + 1 :])) is not None

    def possible(self, axis: int, strategy: list[str | None]) -> list[str]:
        """The strategies other than replication that the axis may take beside those of others."""
        return [n for n in self._order if n != REPLICATED and self.feasible(n, axis, strategy)]

    def rank(self, name: str) -> tuple[int, int]:
        """A fixed order of strategies: that of the rule."""
        factor, inner = factor_of(name)
        return self._order.get(factor, len(self._order)), inner

    def cut(self, dims: Dims, placed: Shard, axis: int) -> str | None:
        """The strategy that cuts a tensor of these dims so; None if no factor lies there."""
        if placed.dim >= len(dims):
            return None
        parts, before = self.parts[axis], 1
        for factor in dims[placed.dim]:
            size = self.rule.sizes[factor]
            if before == placed.outer:
                return factor
            if not isinstance(size, int):
                return None
            inner, left = divmod(placed.outer, before)
            if inner < size:
                fine = not left and size % (inner * parts) == 0
                return f"{factor}{PARTS}{inner}" if fine else None
            before *= size
        return None


class GraphRules:
    """The rules of a graph's ops; each distinct op is looked up once.

    Ops are the same if they have one target, equal arguments, and equal shapes in place of tensors.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.looked_up = 0
        self._known: dict[Hashable, AxisRule | None] = {}
        self._tensors: dict[int, tuple[torch.Tensor, Hashable]] = {}

    def of(self, node: fx.Node) -> AxisRule | None:
        """The op's rule; None where it has none."""
        key = self._signature(node)
        if key not in self._known:
            self.looked_up += 1
            rule = rule_of(node)
            self._known[key] = AxisRule(rule, self.mesh) if rule is not None else None
        return self._known[key]

    def _signature(self, node: fx.Node) -> Hashable:
        given = self._argument(node.args), self._argument(tuple(node.kwargs.items()))
        shapes = tuple(map(self._shape, tensors(node.meta.get("val"))))
        return node.target, given, shapes, origin(node)

    def _argument(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", self._argument(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            return self._shape(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._argument, value))
        if isinstance(value, torch.SymInt):
            return "symbol", expression(value)
        if isinstance(value, dict):
            return tuple((k, self._argument(v)) for k, v in value.items())
        if isinstance(value, (bool, int, float, str, type(None))):
            return type(value).__name__, value
        return type(value).__name__, str(value)

    def _shape(self, tensor: torch.Tensor) -> Hashable:
        """Shape and dtype; reading a fake tensor's takes a while, so each is read once."""
        known = self._tensors.get(id(tensor))
        if known is None:
            sizes = tuple(s if isinstance(s, int) else expression(s) for s in tensor.shape)
            known = self._tensors[id(tensor)] = (tensor, (tensor.dtype, sizes))
        return known[1]
