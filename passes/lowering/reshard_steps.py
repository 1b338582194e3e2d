"""Steps between two placements of a tensor, one mesh axis at a time.

An axis may shard or gather a dim only while no later axis shards that dim, so nested shards are
gathered innermost first. Steps that reduce the data come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.sharding import PARTIAL, REPLICATE, Placement, Shard

Whole = tuple[Placement, ...]  # decided on every axis


@dataclass(frozen=True)
class ReshardStep:
    """One collective on one axis. before: all placements; after: the new placement of the axis.

    kind: the name of the function in :mod:`fxpart.collectives`.
    """

    kind: str
    axis: int
    before: Whole
    after: Placement


def steps(source: Whole, target: Whole) -> tuple[ReshardStep, ...]:
    """Return the steps that convert ``source`` to ``target``, in order."""
    now = list(source)
    found: list[ReshardStep] = []
    while (step := _next(now, target)) is not None:
        found.append(step)
        now[step.axis] = step.after
    assert tuple(now) == target, f"{source} to {target} ends at {now}"
    return tuple(found)


def _next(now: list[Placement], target: Whole) -> ReshardStep | None:
    """Return the cheapest step that is allowed now; None at the target."""
    here = tuple(now)
    open_axes = [a for a in range(len(now)) if now[a] != target[a] or _disturbed(now, target, a)]
    for axis in open_axes:  # sharding: no communication, or a reduce-scatter
        wanted = target[axis]
        if isinstance(wanted, Shard) and _may_cut(now, target, axis, wanted.dim):
            if now[axis] == REPLICATE:
                return ReshardStep("slice_shard", axis, here, wanted)
            if now[axis] == PARTIAL:
                return ReshardStep("reduce_scatter", axis, here, wanted)
    for axis in reversed(open_axes):
        held, wanted = now[axis], target[axis]
        if not (isinstance(held, Shard) and isinstance(wanted, Shard)) or held.dim == wanted.dim:
            continue
        if _innermost(now, axis) and _may_cut(now, target, axis, wanted.dim):
            return ReshardStep("all_to_all", axis, here, wanted)
    for axis in open_axes:
        if now[axis] == PARTIAL and (target[axis] == REPLICATE or _stuck(now, target, axis)):
            return ReshardStep("all_reduce", axis, here, REPLICATE)
    for axis in reversed(open_axes):
        if isinstance(now[axis], Shard) and _innermost(now, axis):
            return ReshardStep("all_gather", axis, here, REPLICATE)
    for axis in open_axes:
        if now[axis] == REPLICATE and target[axis] == PARTIAL:
            return ReshardStep("first_only", axis, here, PARTIAL)
    return None


def _disturbed(now: list[Placement], target: Whole, axis: int) -> bool:
    """Return whether an earlier axis still has to change a dim that this axis shards."""
    held = now[axis]
    return isinstance(held, Shard) and any(
        now[a] != target[a] and held.dim in (_dim(now[a]), _dim(target[a])) for a in range(axis)
    )


def _may_cut(now: list[Placement], target: Whole, axis: int, dim: int) -> bool:
    """Return whether the axis may shard the dim: earlier axes are final, later ones unused."""
    before = all(
        now[a] == target[a] or dim not in (_dim(now[a]), _dim(target[a])) for a in range(axis)
    )
    return before and all(_dim(p) != dim for p in now[axis + 1 :])


def _innermost(now: list[Placement], axis: int) -> bool:
    """Return whether no later axis shards the same dim."""
    return all(_dim(p) != _dim(now[axis]) for p in now[axis + 1 :])


def _stuck(now: list[Placement], target: Whole, axis: int) -> bool:
    """Return whether only reductions remain, so that a reduction cannot wait for sharding."""
    return all(not isinstance(now[a], Shard) for a in range(axis + 1, len(now)))


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None
