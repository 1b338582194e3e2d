"""Propagation along one axis, in rounds of simultaneous decisions independent of op order.

In each round every op with new information decides from the state at the start of the round. Ops
that keep all factors (pointwise, views, norms) run until none is left; then the other ops run one
round, and so on. Ops for which one axis may shard two factors at once (experts and tokens) run
last, when both are known. A decision is final, so an op is visited once per change of a neighbor.

Consequences of annotated inputs take priority: if an axis shards the batch, a weight sharded on the
same axis is stored in shards and gathered (ZeRO-3) instead of being multiplied in shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fxpart.annotations.placement_origin import extend_origin
from fxpart.sharding import PARTIAL, Placement, Shard

from ..rules import PASS
from ..rules.sharding_rule import RuleLayout
from .axis_placements import fits
from .axis_rules import GraphRules
from .propagation_graph import PropagationOp, PropagationValue
from .reshard_bytes import estimate_reshard_bytes


class PropagationChoice(NamedTuple):
    """A strategy of an op or (for a leaf) a placement, and its origin."""

    strategy: str
    placement: Placement | None
    origin: str


# Priority of a proposal, smaller first: an annotated weight, the op's own result, an operand, a
# derived placement, and last a deferred reduction.
_STATE, _OWN, _DIRECT, _DERIVED, _SUM = range(5)


class AxisPropagation:
    """The state of one axis during propagation."""

    def __init__(self, ops: list[PropagationOp], axis: int, rules: GraphRules) -> None:
        self.axis, self.rules, self._ops = axis, rules, ops
        self._new: tuple[dict[PropagationOp, None], ...] = ({}, {}, {})
        self._inputs_only = True

    def run(self) -> None:
        """Decide all consequences: of the inputs first, then of everything."""
        for op in self._ops:
            self._begin(op)
        self._rounds()
        self._inputs_only = False
        for op in self._ops:
            if self._waits(op):
                for value in op.results:
                    self._touch_users(value)
                self._touch(op)
        self._rounds()

    def _waits(self, op: PropagationOp) -> bool:
        """Return whether the op's annotation counts only after those of the inputs."""
        return op.annotated[self.axis] and op.node.op != "placeholder"

    def _rounds(self) -> None:
        """Run rounds until nothing changes."""
        while any(self._new):
            batch = next(filter(None, self._new))
            reached = list(batch)
            batch.clear()
            chosen = [(op, choice) for op in reached if (choice := self._choose(op)) is not None]
            for op, choice in chosen:
                self._apply(op, choice)

    def _touch(self, op: PropagationOp) -> None:
        """Mark an op for the next round because a neighbor changed."""
        open_leaf = op.leaf and op.results[0].placed[self.axis] is None
        if open_leaf or op.strategy[self.axis] is None:
            self._new[op.turn][op] = None

    def _begin(self, op: PropagationOp) -> None:
        """Mark what is known at the start as new."""
        axis, strategy = self.axis, op.strategy[self.axis]
        if op.leaf or strategy is None:
            for value in op.results:
                if value.placed[axis] is not None and not self._waits(op):
                    self._touch(op)
                    self._touch_users(value)
        elif op.ruled is not None:
            made = op.ruled.along(strategy, axis)
            assert made is not None, "a decided strategy is possible"
            self._settle(op, made)

    def _touch_users(self, value: PropagationValue) -> None:
        for user, _ in value.users:
            self._touch(user)

    def _choose(self, op: PropagationOp) -> PropagationChoice | None:
        """Return the best proposal: by priority, then fewest bytes, then the rule's order."""
        if op.leaf:
            return self._placement(op)
        if op.ruled is None:
            return None
        best: dict[str, tuple[int, str]] = {}
        for name, strength, origin in self._proposals(op):
            if name not in best or (strength, origin) < best[name]:
                best[name] = (strength, origin)
        ruled, axis = op.ruled, self.axis
        for name, factors in ruled.rule.together.items():
            if best.keys() >= set(factors):
                best[name] = min(best[factor] for factor in factors)
        possible = [n for n in best if ruled.feasible(n, axis, op.strategy)]
        if len(possible) > 1:
            strongest = min(best[n][0] for n in possible)
            possible = [n for n in possible if best[n][0] == strongest]
        if not possible:
            return None
        if len(possible) > 1:
            possible.sort(key=lambda n: (estimate_reshard_bytes(op, n, axis), ruled.rank(n)))
        return PropagationChoice(possible[0], None, best[possible[0]][1])

    def _proposals(self, op: PropagationOp) -> Iterator[tuple[str, int, str]]:
        """Yield (strategy, priority, origin) for each proposal of the op's operands and results."""
        assert op.ruled is not None
        axis, rule = self.axis, op.ruled.rule
        if op.constant:
            yield from self._of_constant(op)
            return
        for position, value in enumerate(op.inputs):
            placed = value.placed[axis]
            by = value.op
            if self._inputs_only and self._waits(by) and not rule.together:
                continue
            if isinstance(placed, Shard):
                name = op.ruled.cut(rule.operands[position], placed, axis)
                strength = (_STATE if by.trained else _DIRECT) if by.annotated[axis] else _DERIVED
                if name is not None:
                    yield name, strength, extend_origin(by.origins[axis], by.node.name)
            elif placed == PARTIAL and op.turn == 0 and len(op.inputs) == len(value.users) == 1:
                for number, summed in enumerate(rule.linear):
                    if summed == {0} and not value.leaves:
                        yield f"{PASS}{number}", _SUM, extend_origin(by.origins[axis], by.node.name)
        for index, value in enumerate(op.results):
            for placement, strength, origin in self._requests(value):
                name = op.ruled.cut(rule.results[index], placement, axis)
                if name is not None:
                    yield name, strength, origin

    def _requests(self, value: PropagationValue) -> Iterator[tuple[Shard, int, str]]:
        """Yield the requested shardings of a result: of its annotation, else of its users."""
        placed = value.placed[self.axis]
        if value.pinned[self.axis]:
            if isinstance(placed, Shard) and not (self._inputs_only and self._waits(value.op)):
                yield placed, _OWN, extend_origin(value.op.origins[self.axis], value.op.node.name)
            return
        for wanted, (_, origin) in value.demands[self.axis].items():
            if isinstance(wanted, Shard):
                yield wanted, _DERIVED, origin

    def _of_constant(self, op: PropagationOp) -> Iterator[tuple[str, int, str]]:
        """Shard a value computed from constants only if every user requests the same shard.

        Otherwise it is computed whole and sliced, which needs no communication.
        """
        assert op.ruled is not None
        found: dict[str, tuple[int, str]] = {}
        for index, value in enumerate(op.results):
            if not value.users and not value.leaves:
                continue
            wanted = value.placed[self.axis] or value.unanimous(self.axis)
            if not isinstance(wanted, Shard):
                return
            name = op.ruled.cut(op.ruled.rule.results[index], wanted, self.axis)
            if name is None:
                return
            requests = [w for w in self._requests(value) if w[0] == wanted]
            found[name] = min((strength, origin) for _, strength, origin in requests)
        if len(found) == 1:
            name, (strength, origin) = found.popitem()
            yield name, strength, origin

    def _placement(self, op: PropagationOp) -> PropagationChoice | None:
        """Return the placement of an input or state that most of its users request."""
        (value,) = op.results
        axis = self.axis
        wanted = {p: origin for p, origin in value.demands[axis].items() if isinstance(p, Shard)}
        if op.constant and value.unanimous(axis) is None:
            return None
        order = sorted(wanted, key=lambda p: (-wanted[p][0], p.dim, f"{p.outer:>9}"))
        for placement in order:
            placed = (*value.placed[:axis], placement, *value.placed[axis + 1 :])
            if fits(placed, value.tensor.shape, self.rules.mesh):
                return PropagationChoice("", placement, wanted[placement][1])
        return None

    def _apply(self, op: PropagationOp, choice: PropagationChoice) -> None:
        """Make a choice final and update the neighbors."""
        axis = self.axis
        if not op.annotated[axis]:
            op.origins[axis] = choice.origin
        if op.leaf:
            op.results[0].placed[axis] = choice.placement
            self._touch_users(op.results[0])
            return
        assert op.ruled is not None
        op.strategy[axis] = choice.strategy
        made = op.ruled.along(choice.strategy, axis)
        assert made is not None
        self._settle(op, made)

    def _settle(self, op: PropagationOp, made: RuleLayout) -> None:
        """Set the placements of results and the requested placements of operands."""
        axis = self.axis
        for value, out in zip(op.results, made.results, strict=True):
            if not value.pinned[axis]:
                value.placed[axis] = out[0]
            self._touch_users(value)
        origin = extend_origin(op.origins[axis], op.node.name)
        for value, into in zip(op.inputs, made.operands, strict=True):
            wanted = into[0]
            assert wanted is not None
            value.demand(axis, wanted, origin)
            self._touch(value.op)


def propagate_axes(ops: list[PropagationOp], axes: Iterable[int], rules: GraphRules) -> None:
    """Propagate along each axis, the major one first."""
    for axis in axes:
        AxisPropagation(ops, axis, rules).run()
