"""Reshards as nodes: each step is one collective, shared by equal requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from fxpart import collectives
from fxpart.sharding import PARTIAL, REPLICATE, Shard

from .local_sizes import LocalSizes, Size
from .placement_requirements import PlacementRequirement, PlacementRequirements
from .reshard_steps import ReshardStep, Whole, steps

# (target, args, kwargs) -> the new node
Add = Callable[[Any, tuple[Any, ...], dict[str, Any]], fx.Node]
_SMALLER = ("slice_shard", "reduce_scatter", "all_to_all")


class ReshardBuilder:
    """Builds the local value that a user requires from the existing local value.

    On an axis on which the value is replicated, ``enter`` reduces a Partial gradient, and ``leave``
    turns a replicated gradient into a Partial one. Steps that gather or reduce accept either.
    """

    def __init__(
        self,
        demands: PlacementRequirements,
        local: LocalSizes,
        size: Callable[[Size], Any],
        add: Add,
    ) -> None:
        """size: converts a size to an argument. add: appends a call to the local graph."""
        self.demands, self.local, self.size, self.add = demands, local, size, add
        self._made: dict[Hashable, fx.Node] = {}

    def operand(
        self, demand: PlacementRequirement, held: fx.Node, shape: Sequence[Size], block: int | None
    ) -> fx.Node:
        """Return the value as the user requires it. shape: global shape; block: of the user.

        Inputs and state are resharded separately in each block, since every stage has its own copy.
        """
        home = self.demands.home(demand.source)
        own = block if demand.source.op in ("placeholder", "get_attr") else None
        todo = steps(home, demand.target)
        early = next((i for i, s in enumerate(todo) if s.kind not in _SMALLER), len(todo))
        for step in todo[:early]:
            held = self._step(demand, step, held, shape, own)
        for function, axis in self._before(demand, home):
            held = self._once(function, (held, axis), own, {})
        for step in todo[early:]:
            held = self._step(demand, step, held, shape, own)
        for function, axis in self._after(demand, home):
            held = self._once(function, (held, axis), own, {})
        return held

    def pinned(self, given: Whole, home: Whole, held: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """Return a result in its annotated placements."""
        for step in steps(given, home):
            held = self._call(step, held, shape, "R", "R", None)
        return held

    def _before(self, demand: PlacementRequirement, home: Whole) -> list[tuple[Any, str]]:
        """Return gradient conversions before resharding, for axes with a replicated value."""
        found = []
        for axis, name in enumerate(self.demands.mesh.names):
            if not demand.flows or home[axis] != REPLICATE:
                continue
            waits = axis in self.demands.partial.get(demand.source, ())
            partial = self._leaves_partial(demand, axis)
            if demand.target[axis] == REPLICATE and partial != waits:
                found.append((collectives.enter if partial else collectives.leave, name))
            elif demand.target[axis] == PARTIAL and waits:  # first_only gives a whole gradient
                found.append((collectives.leave, name))
        return found

    def _after(self, demand: PlacementRequirement, home: Whole) -> list[tuple[Any, str]]:
        """Return gradient conversions after resharding, for users with a replicated gradient."""
        return [
            (collectives.leave, name)
            for axis, name in enumerate(self.demands.mesh.names)
            if demand.flows
            and home[axis] != REPLICATE
            and demand.target[axis] == REPLICATE
            and axis in self.demands.joined.get(demand.source, ())
            and not self._leaves_partial(demand, axis)
        ]

    def _leaves_partial(self, demand: PlacementRequirement, axis: int) -> bool:
        """Return whether the user returns a Partial gradient: of its op, or passed through."""
        passed = axis in self.demands.partial.get(demand.user, ())
        through = passed and demand.target[axis] == REPLICATE
        return through or demand.gradient[axis] == PARTIAL

    def _step(
        self,
        demand: PlacementRequirement,
        step: ReshardStep,
        held: fx.Node,
        shape: Sequence[Size],
        own: int | None,
    ) -> fx.Node:
        axis = step.axis
        was_whole = self.demands.home(demand.source)[axis] == REPLICATE
        is_whole = demand.target[axis] == REPLICATE
        back = was_whole and axis in self.demands.partial.get(demand.source, ())
        joined = is_whole and axis in self.demands.joined.get(demand.source, ())
        ways = ["P" if partial and demand.flows else "R" for partial in (joined, back)]
        return self._call(step, held, shape, ways[0], ways[1], own)

    def _call(
        self,
        step: ReshardStep,
        held: fx.Node,
        shape: Sequence[Size],
        joined: str,
        back: str,
        own: int | None,
    ) -> fx.Node:
        """Add one step. joined, back: gradient of the value that is replicated after, before it."""
        axis = self.demands.mesh.names[step.axis]
        before, after = step.before[step.axis], step.after
        rest: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        outer = self._outer(step, before) if isinstance(before, Shard) else 1
        if isinstance(before, Shard) and isinstance(after, Shard):
            rest = (before.dim, after.dim, self._joined(step, shape))
            named = {"source_outer": outer, "target_outer": self._outer(step, after)}
        elif isinstance(before, Shard):
            rest = (before.dim, self._joined(step, shape))
            named = {"outer": outer, "gradient": joined}
        elif isinstance(after, Shard):
            rest = (after.dim,)
            named = {
                "outer": self._outer(step, after),
                "gradient": back if before == REPLICATE else "R",
            }
        elif step.kind == "all_reduce":
            named = {"gradient": joined}
        function = getattr(collectives, step.kind)
        return self._once(function, (held, axis, *rest), own, _without_defaults(named))

    def _outer(self, step: ReshardStep, placement: Shard) -> Any:
        """Return the number of outer parts of a placement on the step's axis."""
        placed = (*step.before[: step.axis], placement, *step.before[step.axis + 1 :])
        return self.size(self.local.outer(placed, step.axis))

    def _joined(self, step: ReshardStep, shape: Sequence[Size]) -> Any:
        """Return the size of the gathered dim."""
        held = step.before[step.axis]
        assert isinstance(held, Shard), "only a sharded dim is gathered"
        before = (*step.before[: step.axis], REPLICATE, *step.before[step.axis + 1 :])
        return self.size(self.local.shape(shape, before)[held.dim])

    def _once(
        self, function: Any, args: tuple[Any, ...], own: int | None, named: dict[str, Any]
    ) -> fx.Node:
        key = (function, args, own, tuple(named.items()))
        if key not in self._made:
            self._made[key] = self.add(function, args, named)
        return self._made[key]


def _without_defaults(named: dict[str, Any]) -> dict[str, Any]:
    """Drop keyword arguments that have their default value."""
    return {name: given for name, given in named.items() if given not in ("R", 1)}
