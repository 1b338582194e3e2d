"""What a sharding rule is: an op's dims named by factors, and what follows from cutting one.

The notation is that of einsum, with compound dims: ``"b s (h d) -> b s h d"``. An axis of the mesh
cuts one factor (or none): operands and results with the factor are Shard there, operands without
it are Replicate and get a Partial gradient, results without it are Partial. A gradient of a Partial
value is Replicate, that of a Shard the same Shard. Every rule has a numeric soundness test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Placements, Shard, chunk

Dims: TypeAlias = tuple[tuple[str, ...], ...]  # per dim its factors, major first; () has size 1
Size: TypeAlias = int | torch.SymInt
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# (node, its args and kwargs with operands in place, local shapes of operands, of results)
Localise: TypeAlias = Callable[
    [fx.Node, Arguments, Sequence[tuple[Size, ...]], Sequence[tuple[Size, ...]]], Arguments
]

REPLICATED = ""  # the strategy that cuts nothing
PASS = "+"  # "+0": the operands of rule.linear[0] are Partial, and so are the results
PARTS = "/"  # "n/3": factor n seen as [3, rest], and rest is cut (a fused query-key-value weight)


@dataclass(frozen=True)
class ShardingRule:
    """One op's factors.

    operands: the dims of each tensor argument, in the order of :func:`operands`. results: of each
    tensor returned. sizes: of every factor, whole. whole: factors that may not be cut. additive:
    operands that are added to the result: where it is Partial they are Partial too (a bias), not
    Replicate. linear: sets of operands that may be Partial together, the others Replicate; then the
    results are Partial. localise: rewrites arguments that hold sizes (of a view) for local shapes.
    forms: per factor the name of a function of :mod:`fxpart.collectives` that replaces the op where
    the factor is cut, called as ``form(mesh, axes, size, *args, **kwargs)``: axes cut the factor,
    major first; size is the whole factor's. results_of: per factor of ``forms``, what its results
    are where that is not what the notation says (Replicate after an all-reduce inside). together:
    strategies by which one axis cuts several factors at once, no two of one tensor: name -> the
    factors. They have a form, called with ``sizes[name]`` (experts on the lanes that cut the
    tokens).
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, Size]
    whole: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    localise: Localise | None = None
    forms: Mapping[str, str] = field(default_factory=dict)
    results_of: Mapping[str, tuple[Placement | None, ...]] = field(default_factory=dict)
    together: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in the order of first appearance."""
        found: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            found.update(dict.fromkeys(f for dim in dims for f in dim))
        return tuple(found)


@dataclass(frozen=True)
class RuleLayout:
    """What a choice of factors means: placements of operands and results, one for each axis.

    gradients: per operand those of its gradient, as the op's own backward leaves it.
    """

    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    gradients: tuple[Placements, ...]


def parse(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """``"b (t j) -> b j, b t"`` as dims of operands and results; ``1`` is a dim without factors."""
    left, arrow, right = text.partition("->")
    assert arrow, f"a rule has an arrow: {text!r}"
    return tuple(map(_dims, left.split(","))), tuple(map(_dims, right.split(",")))


def _dims(text: str) -> Dims:
    found: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            assert group is not None, f"a bracket too many in {text!r}"
            found.append(tuple(group))
            group = None
        elif group is not None:
            group.append(word)
        else:
            found.append(() if word == "1" else (word,))
    return tuple(found)


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a call, in the order of args and kwargs, lists flattened.

    An argument that stands in two places counts twice.
    """
    found: list[fx.Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), torch.Tensor):
                found.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(node.args)
    visit(tuple(node.kwargs.values()))
    return found


def layout(rule: ShardingRule, strategy: Sequence[str], mesh: Mesh) -> RuleLayout | None:
    """What the factors of ``strategy`` (one for each axis) mean; None where that is impossible.

    A factor that shares a dim with others must divide evenly; one alone may be cut unevenly, but no
    lane is left without any of it. What is left of a symbolic factor is taken to divide (the
    runtime sees to the batch).
    """
    formed = {f for f in (factor_of(name)[0] for name in strategy) if f in rule.forms}
    if len(formed) > 1 and not any(formed == set(key.split()) for key in rule.forms):
        return None  # there is no form in which both are cut
    left: dict[str, Size] = dict(rule.sizes)
    held: dict[str, set[int]] = {}
    columns: list[tuple[list[Placement], list[Placement], list[Placement]]] = []
    for name, parts in zip(strategy, mesh.shape, strict=True):
        column = _column(rule, name, left)
        if column is None or not _cut(rule, name, parts, left, held):
            return None
        columns.append(column)
    return RuleLayout(*(
        tuple(tuple(column[kind][i] for column in columns) for i in range(count))
        for kind, count in enumerate((len(rule.operands), len(rule.results), len(rule.operands)))
    ))  # fmt: skip


def _column(
    rule: ShardingRule, name: str, left: Mapping[str, Size]
) -> tuple[list[Placement], list[Placement], list[Placement]] | None:
    """Placements along one axis: operands, results, gradients of operands."""
    count, given = len(rule.operands), len(rule.results)
    if name == REPLICATED:
        return [REPLICATE] * count, [REPLICATE] * given, [REPLICATE] * count
    if name.startswith(PASS):
        summed = rule.linear[int(name[1:])]
        inside: list[Placement] = [PARTIAL if i in summed else REPLICATE for i in range(count)]
        back: list[Placement] = [REPLICATE if i in summed else PARTIAL for i in range(count)]
        return inside, [PARTIAL] * given, back
    name, inner = factor_of(name)
    cut = rule.together.get(name, (name,))
    if any(f in rule.whole or f not in rule.sizes for f in cut):
        return None
    if inner > 1 and name in rule.forms:
        return None
    into, out = [_shards(d, cut, left, inner) for d in rule.operands], []
    for index, dims in enumerate(rule.results):
        told = rule.results_of.get(name, ())
        fixed = told[index] if index < len(told) else None
        out.append(fixed if fixed is not None else _shards(dims, cut, left, inner) or PARTIAL)
    summed = rule.additive if PARTIAL in out else frozenset()
    if any(place is _IMPOSSIBLE for place in (*into, *out)):
        return None
    inside = [p or (PARTIAL if i in summed else REPLICATE) for i, p in enumerate(into)]
    back = [p or (REPLICATE if i in summed else PARTIAL) for i, p in enumerate(into)]
    return inside, out, back


_IMPOSSIBLE = Shard(-1)


def factor_of(strategy: str) -> tuple[str, int]:
    """``"n"`` is (n, 1), ``"n/3"`` is (n, 3)."""
    name, _, parts = strategy.partition(PARTS)
    return name, int(parts or 1)


def _shards(dims: Dims, names: Sequence[str], left: Mapping[str, Size], inner: int) -> Shard | None:
    """Where the one of the factors that a tensor has lies in it."""
    return next((s for name in names if (s := _shard(dims, name, left, inner))), None)


def _shard(dims: Dims, name: str, left: Mapping[str, Size], inner: int = 1) -> Shard | None:
    """Where a factor, seen as [inner, rest], lies in a tensor: None where it does not."""
    for index, factors in enumerate(dims):
        if name in factors:
            outer = inner
            for before in factors[: factors.index(name)]:
                size = left[before]
                if not isinstance(size, int):
                    return _IMPOSSIBLE
                outer *= size
            return Shard(index, outer)
    return None


def _cut(
    rule: ShardingRule, name: str, parts: int, left: dict[str, Size], held: dict[str, set[int]]
) -> bool:
    """Whether ``parts`` pieces can be cut of the factor, none empty; notes what is left of it.

    left: the longest piece of each factor. held: the lengths of all pieces, where they are numbers.
    """
    if name == REPLICATED or name.startswith(PASS):
        return True
    name, inner = factor_of(name)
    each = rule.together.get(name, (name,))
    return all(_cut_one(rule, factor, inner, parts, left, held) for factor in each)


def _cut_one(
    rule: ShardingRule,
    name: str,
    inner: int,
    parts: int,
    left: dict[str, Size],
    held: dict[str, set[int]],
) -> bool:
    """The same for one of the factors that a strategy cuts."""
    size = left[name]
    if not isinstance(size, int):
        left[name] = size // parts
        return inner == 1
    lengths = held.get(name, {size})
    left[name] = -(-size // parts)
    held[name] = {b - a for n in lengths for a, b in (chunk(n, parts, i) for i in range(parts))}
    if all(n % (inner * parts) == 0 for n in lengths):
        return True
    alone = all(
        dim == (name,) for dims in (*rule.operands, *rule.results) for dim in dims if name in dim
    )
    return alone and inner == 1 and 0 not in held[name]


def choices(rule: ShardingRule) -> tuple[str, ...]:
    """Every strategy for one axis: none, factors that may be cut, some together, linear sets."""
    cut = tuple(f for f in rule.factors if f not in rule.whole)
    both = tuple(name for name, each in rule.together.items() if rule.whole.isdisjoint(each))
    return (REPLICATED, *cut, *both, *(f"{PASS}{i}" for i in range(len(rule.linear))))
