"""Sharding rules per mesh axis, cached for all ops of one signature."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.sharding import Mesh, Shard

from ..rules import REPLICATED, RuleLayout, ShardingRule, choices, layout, origin, rule_of
from ..rules.outer_parts import divide_parts, divides, multiply_parts
from ..rules.sharding_rule import PARTS, Dims, factor_of


class AxisRule:
    """A rule and its layouts along one axis or all axes.

    passes: whether every shardable factor of the operands appears in all results.
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
        """Return the layout along one axis on its own; None if impossible."""
        key = (name, self.parts[axis])
        if key not in self._along:
            self._along[key] = layout(self.rule, (name,), self._only[axis])
        return self._along[key]

    def joint(self, strategy: tuple[str | None, ...]) -> RuleLayout | None:
        """Return the layout along all axes, with undecided ones replicated; None if impossible."""
        names = tuple(name or REPLICATED for name in strategy)
        if names not in self._joint:
            self._joint[names] = layout(self.rule, names, self.mesh)
        return self._joint[names]

    def feasible(self, name: str, axis: int, strategy: list[str | None]) -> bool:
        """Return whether the axis may take this strategy beside those of the other axes."""
        if self.along(name, axis) is None:
            return False
        return self.joint((*strategy[:axis], name, *strategy[axis + 1 :])) is not None

    def possible(self, axis: int, strategy: list[str | None]) -> list[str]:
        """Return the strategies other than replication that the axis may take."""
        return [n for n in self._order if n != REPLICATED and self.feasible(n, axis, strategy)]

    def rank(self, name: str) -> tuple[int, str]:
        """Return the position of a strategy in the rule's order."""
        factor, inner = factor_of(name)
        return self._order.get(factor, len(self._order)), f"{inner:>9}"

    def cut(self, dims: Dims, placed: Shard, axis: int) -> str | None:
        """Return the strategy that shards a tensor of these dims this way, or None."""
        if placed.dim >= len(dims):
            return None
        parts, before = self.parts[axis], 1
        for number, factor in enumerate(dims[placed.dim]):
            size = self.rule.sizes[factor]
            if before == placed.outer:
                return factor
            if not isinstance(placed.outer, int) or not isinstance(size, int):
                return self._cut_symbolic(dims[placed.dim][number:], placed.outer, before)
            inner, left = divmod(placed.outer, before)
            if inner < size:
                fine = not left and size % (inner * parts) == 0
                return f"{factor}{PARTS}{inner}" if fine else None
            before *= size
        return None

    def _cut_symbolic(
        self, factors: Sequence[str], outer: int | str, before: int | str
    ) -> str | None:
        """Return the strategy along the factors of a dim, where a size is a symbol."""
        for factor in factors:
            if before == outer:
                return factor
            size = self.rule.sizes[factor]
            inner = divide_parts(outer, before)
            if inner is None:
                return None
            if divides(inner, size) or (isinstance(inner, int) and not isinstance(size, int)):
                return f"{factor}{PARTS}{inner}"
            after = multiply_parts(before, size)
            if after is None:
                return None
            before = after
        return None


class GraphRules:
    """The rules of a graph's ops; each distinct op is looked up once.

    Ops are equal if they have the same target, equal arguments, and tensors of equal shapes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.looked_up = 0
        self._known: dict[Hashable, AxisRule | None] = {}
        self._tensors: dict[int, tuple[torch.Tensor, Hashable]] = {}

    def of(self, node: fx.Node) -> AxisRule | None:
        """Return the op's rule; None if it has none."""
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
        """Return shape and dtype, cached because reading them from a fake tensor is slow."""
        known = self._tensors.get(id(tensor))
        if known is None:
            sizes = tuple(s if isinstance(s, int) else expression(s) for s in tensor.shape)
            known = self._tensors[id(tensor)] = (tensor, (tensor.dtype, sizes))
        return known[1]
