"""What a local graph calls for an op: the op itself, its form where a cut needs other lanes, or a
lane's part of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpart import collectives
from fxpart.errors import error
from fxpart.pipeline.edit import place, value
from fxpart.pipeline.sizes import tensors
from fxpart.rng import seeded
from fxpart.sharding import Shard, format_placements

from ..rules.rule import factor_of
from .demands import Demands

Shapes = tuple[Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]]]


@dataclass(frozen=True)
class Call:
    """A target with its arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(
    node: fx.Node,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    demands: Demands,
    shapes: Shapes,
    whole: Callable[[Any], Any],
) -> Call:
    """The local call of a node.

    arguments: its own, operands already local and sizes whole. shapes: local ones of operands and
    results. whole: a size of the whole graph, said in the local one's symbols.
    """
    rule, strategy = demands.rules.get(node), demands.strategies.get(node, ())
    if rule is None:
        return Call(node.target, *arguments)
    if rule.localise is not None:
        arguments = rule.localise(node, arguments, *shapes)
    args, kwargs = arguments
    cut: dict[str, list[str]] = {}
    for name, axis in zip(strategy, demands.mesh.names, strict=True):
        factor, _ = factor_of(name)
        if factor in rule.forms:
            cut.setdefault(factor, []).append(axis)
    if cut:
        (factor, axes), *others = cut.items()
        if others:
            why = f"the factors {', '.join(cut)} need other lanes and are cut at once"
            raise error("FXP900", where=place(node), why=why)
        form = getattr(collectives, rule.forms[factor])
        return Call(form, (tuple(axes), whole(rule.sizes[factor]), *args), kwargs)
    given = demands.given[node]
    if node.target is seeded and any(isinstance(p, Shard) for p in given[0]):
        shape = [whole(size) for size in tensors(value(node))[0].shape]
        text = format_placements(given[0], demands.mesh)
        return Call(collectives.random_shard, (shape, text, *args), kwargs)  # type: ignore[attr-defined]
    return Call(node.target, args, kwargs)
