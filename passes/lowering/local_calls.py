"""Calls of a rank-local graph: an op itself, its sharded form, or a shard of a random tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpart import collectives
from fxpart.compiler.graph_edit import describe_node, value
from fxpart.compiler.tensor_sizes import tensors
from fxpart.errors import error
from fxpart.rng import seeded
from fxpart.sharding import Mesh, Shard, format_placements

from ..rules.sharding_rule import factor_of
from .placement_requirements import PlacementRequirements

Shapes = tuple[Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]]]


@dataclass(frozen=True)
class LocalCall:
    """A call target with its arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(
    node: fx.Node,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    demands: PlacementRequirements,
    shapes: Shapes,
    whole: Callable[[Any], Any],
) -> LocalCall:
    """Return the local call of a node.

    arguments: the node's, with local operands and global sizes. shapes: local shapes of operands
    and results. whole: converts a global size to the symbols of the local graph.
    """
    rule, strategy = demands.rules.get(node), demands.strategies.get(node, ())
    if rule is None:
        return LocalCall(node.target, *arguments)
    if rule.localise is not None:
        arguments = rule.localise(node, arguments, *shapes)
    args, kwargs = arguments
    wanted = {f for f in (factor_of(name)[0] for name in strategy) if f in rule.forms}
    if wanted:
        key = next((k for k in rule.forms if set(k.split()) == wanted), None)
        if key is None:
            why = f"no sharded form implements the strategy {', '.join(strategy)}"
            raise error("FXP900", where=describe_node(node), why=why)
        factors = key.split()
        axes = [_axes(strategy, factor, demands.mesh) for factor in factors]
        sizes = [whole(rule.sizes[factor]) for factor in factors]
        inner = next((n for f, n in map(factor_of, strategy) if f in rule.local), 1)
        if inner != 1:  # a rank has a piece of each of so many parts
            kwargs = {**kwargs, "stripes": inner}
        first = (axes[0], sizes[0]) if len(factors) == 1 else (tuple(axes), tuple(sizes))
        return LocalCall(getattr(collectives, rule.forms[key]), (*first, *args), kwargs)
    given = demands.given[node]
    if node.target is seeded and any(isinstance(p, Shard) for p in given[0]):
        if any(isinstance(p, Shard) and isinstance(p.outer, str) for p in given[0]):
            raise error(
                "FXP108",
                where=describe_node(node),
                why="it draws random numbers for rows of [batch, sequence] in one dim, whose "
                "sequence is sharded",
                fix="replicate the sequence, or keep batch and sequence as two dims",
            )
        shape = [whole(size) for size in tensors(value(node))[0].shape]
        text = format_placements(given[0], demands.mesh)
        return LocalCall(collectives.random_shard, (shape, text, *args), kwargs)
    return LocalCall(node.target, args, kwargs)


def _axes(strategy: Sequence[str], factor: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that shard a factor, major first."""
    names = zip(mesh.names, strategy, strict=True)
    return tuple(axis for axis, name in names if factor_of(name)[0] == factor)
