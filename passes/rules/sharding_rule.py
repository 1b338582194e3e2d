"""Sharding rules: an op's dims named by factors, and the layouts that follow.

The notation is that of einsum, with compound dims: ``"b s (h d) -> b s h d"``. A mesh axis shards
one factor (or none): operands and results with the factor are Shard there, operands without it are
Replicate with a Partial gradient, results without it are Partial. The gradient of a Partial value
is Replicate, that of a Shard is the same Shard. Every rule has a numeric soundness test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from fxpart.compiler.tensor_sizes import expression
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Placements, Shard, chunk

from .outer_parts import divides, multiply_parts

Dims: TypeAlias = tuple[tuple[str, ...], ...]  # factors of each dim, major first; () for size 1
Size: TypeAlias = int | torch.SymInt
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# (node, args and kwargs with local operands, local shapes of operands, local shapes of results)
Localise: TypeAlias = Callable[
    [fx.Node, Arguments, Sequence[tuple[Size, ...]], Sequence[tuple[Size, ...]]], Arguments
]

REPLICATED = ""  # the strategy that shards nothing
PASS = "+"  # "+0": the operands of rule.linear[0] are Partial, and so are the results
PARTS = "/"  # "n/3": factor n as [3, rest] with rest sharded (a fused query-key-value weight)


@dataclass(frozen=True)
class ShardingRule:
    """The factors of one op.

    operands: the dims of each tensor argument, in the order of :func:`operands`. results: of each
    returned tensor. sizes: the global size of every factor. whole: factors that must not be
    sharded. additive: operands that are added to the result; they are Partial if the result is (a
    bias), not Replicate. linear: sets of operands that may be Partial together, with the others
    Replicate and Partial results. ``localise``: rewrites size arguments (of a view) for local
    shapes. forms: per factor, the name of the function in :mod:`fxpart.collectives` that replaces
    the op if the factor is sharded, called as ``form(mesh, axes, size, *args, **kwargs)``: axes
    shard the factor, major first; size is the factor's global size. results_of: per factor of
    ``forms``, result placements that differ from the notation (Replicate after an internal
    all-reduce). unordered: factors of ``forms`` whose form takes any of the rows, not only
    consecutive ones. local: those whose form does not communicate. together: strategies in which
    one axis shards several factors at once, no two of one tensor: name -> the factors. They have a
    form, called with ``sizes[name]`` (such as experts on the ranks that shard the tokens).
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
    unordered: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    together: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make symbols numbers whose size torch has found out."""
        sizes = {name: _number(size) for name, size in self.sizes.items()}
        object.__setattr__(self, "sizes", sizes)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        found: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            found.update(dict.fromkeys(f for dim in dims for f in dim))
        return tuple(found)


def _number(size: Size) -> Size:
    known = expression(size)
    return known if isinstance(known, int) else size


@dataclass(frozen=True)
class RuleLayout:
    """Placements of operands and results under a strategy, one per axis.

    gradients: placements of each operand's gradient, as the op's own backward returns it.
    """

    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    gradients: tuple[Placements, ...]


def parse(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Parse ``"b (t j) -> b j, b t"`` to dims of operands and results; ``1`` has no factors."""
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
    """Return the tensor arguments of a call, in the order of args and kwargs, lists flattened.

    An argument in two positions counts twice.
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
    """Return the layout of a strategy (one factor per axis); None if it is impossible.

    A factor that shares a dim with others must divide evenly. A factor alone in its dim may be
    sharded unevenly, but no rank may get an empty shard. Symbolic factors are assumed to divide
    (the runtime checks the batch).
    """
    formed = {f for f in (factor_of(name)[0] for name in strategy) if f in rule.forms}
    if len(formed) > 1 and not any(formed == set(key.split()) for key in rule.forms):
        return None  # no form shards both
    left: dict[str, Size] = dict(rule.sizes)
    lengths: dict[str, set[int]] = {}
    columns: list[tuple[list[Placement], list[Placement], list[Placement]]] = []
    for name, parts in zip(strategy, mesh.shape, strict=True):
        column = _column(rule, name, left)
        if column is None or not _cut(rule, name, parts, left, lengths):
            return None
        columns.append(column)
    return RuleLayout(*(
        tuple(tuple(column[kind][i] for column in columns) for i in range(count))
        for kind, count in enumerate((len(rule.operands), len(rule.results), len(rule.operands)))
    ))  # fmt: skip


def _column(
    rule: ShardingRule, name: str, left: Mapping[str, Size]
) -> tuple[list[Placement], list[Placement], list[Placement]] | None:
    """Return the placements along one axis: operands, results, gradients of operands."""
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
    if inner != 1 and name in rule.forms and name not in rule.unordered:
        return None
    into, out = [_shards(rule, d, cut, left, inner) for d in rule.operands], []
    for index, dims in enumerate(rule.results):
        placements = rule.results_of.get(name, ())
        fixed = placements[index] if index < len(placements) else None
        out.append(fixed if fixed is not None else _shards(rule, dims, cut, left, inner) or PARTIAL)
    summed = rule.additive if PARTIAL in out else frozenset()
    if any(place is _IMPOSSIBLE for place in (*into, *out)):
        return None
    inside = [p or (PARTIAL if i in summed else REPLICATE) for i, p in enumerate(into)]
    back = [p or (REPLICATE if i in summed else PARTIAL) for i, p in enumerate(into)]
    return inside, out, back


_IMPOSSIBLE = Shard(-1)


def factor_of(strategy: str) -> tuple[str, int | str]:
    """Parse ``"n"`` to (n, 1), ``"n/3"`` to (n, 3) and ``"n/s0"`` to (n, s0)."""
    name, _, parts = strategy.partition(PARTS)
    return name, int(parts or 1) if parts.isdigit() or not parts else parts


def _shards(
    rule: ShardingRule,
    dims: Dims,
    names: Sequence[str],
    left: Mapping[str, Size],
    inner: int | str,
) -> Shard | None:
    """Return the Shard of the one of the factors that a tensor has; None if it has none."""
    return next((s for name in names if (s := _shard(rule, dims, name, left, inner))), None)


def _shard(
    rule: ShardingRule, dims: Dims, name: str, left: Mapping[str, Size], inner: int | str
) -> Shard | None:
    """Return the Shard of a factor, seen as [inner, rest]; None if the tensor lacks it.

    Outer parts count in the dim as earlier axes have sharded it; in the whole dim if symbolic.
    """
    for index, factors in enumerate(dims):
        if name in factors:
            major = factors[: factors.index(name)]
            known = all(isinstance(left[f], int) for f in major) and isinstance(inner, int)
            outer: int | str | None = inner
            for factor in reversed(major):
                size = (left if known else rule.sizes)[factor]
                outer = None if outer is None else multiply_parts(outer, size)
            return _IMPOSSIBLE if outer is None else Shard(index, outer)
    return None


def _cut(
    rule: ShardingRule, name: str, parts: int, left: dict[str, Size], lengths: dict[str, set[int]]
) -> bool:
    """Return whether a factor divides into ``parts`` nonempty shards; record the remaining sizes.

    left: the longest shard of each factor. lengths: the lengths of all shards, if they are numbers.
    """
    if name == REPLICATED or name.startswith(PASS):
        return True
    name, inner = factor_of(name)
    each = rule.together.get(name, (name,))
    return all(_cut_one(rule, factor, inner, parts, left, lengths) for factor in each)


def _cut_one(
    rule: ShardingRule,
    name: str,
    inner: int | str,
    parts: int,
    left: dict[str, Size],
    lengths: dict[str, set[int]],
) -> bool:
    """Check one of the factors that a strategy shards; see :func:`_cut`."""
    size = left[name]
    if not isinstance(size, int):
        left[name] = size // parts
        return isinstance(inner, int) or divides(inner, rule.sizes[name])
    if not isinstance(inner, int):
        return False
    known = lengths.get(name, {size})
    left[name] = -(-size // parts)
    lengths[name] = {b - a for n in known for a, b in (chunk(n, parts, i) for i in range(parts))}
    if all(n % (inner * parts) == 0 for n in known):
        return True
    alone = all(
        dim == (name,) for dims in (*rule.operands, *rule.results) for dim in dims if name in dim
    )
    return alone and inner == 1 and 0 not in lengths[name]


def choices(rule: ShardingRule) -> tuple[str, ...]:
    """Return every strategy of one axis: none, factors, combined factors, linear sets."""
    cut = tuple(f for f in rule.factors if f not in rule.whole)
    both = tuple(name for name, each in rule.together.items() if rule.whole.isdisjoint(each))
    return (REPLICATED, *cut, *both, *(f"{PASS}{i}" for i in range(len(rule.linear))))
