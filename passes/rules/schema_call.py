"""Calls as seen by sharding rules: named arguments, shapes, and a rule builder.

A factor whose name starts with ``_`` is not sharded. A dim of size 1 has no factor, whatever a rule
names it, so one rule also serves broadcast operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fxpart.compat import operation_schema
from fxpart.compiler.effects import op_args, op_of, packet_name
from fxpart.compiler.tensor_sizes import expression, tensors
from fxpart.rng import seeded
from fxpart.sharding import Placement

from .sharding_rule import Arguments, Dims, Localise, ShardingRule, Size

Dim: TypeAlias = str | tuple[str, ...]  # one factor, or several with the major first
Shape: TypeAlias = tuple[Size, ...]
Maker: TypeAlias = Callable[["SchemaCall"], ShardingRule | None]
Entry: TypeAlias = Maker | str


class UncoveredCallError(Exception):
    """Raised for a call that the op's rule does not cover."""


@cache
def _declared(op: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Return each argument's name, whether it is a tensor argument, and its default."""
    return tuple(
        (a.name, "Tensor" in str(a.type), a.default_value if a.has_default_value() else None)
        for a in operation_schema(op).arguments
    )


class SchemaCall:
    """One call_function node of an op with a schema.

    given: arguments by name, defaults included. operands: (name, shape) of each tensor argument, in
    the order of :func:`fxpart.passes.rules.operands`. results: the shape of each returned tensor.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node, self.op = node, op_of(node)
        self.name = packet_name(self.op)
        declared = _declared(self.op)
        self.given: dict[str, Any] = {name: default for name, _, default in declared}
        ordered = [(d[0], a) for d, a in zip(declared, op_args(node), strict=False)]
        ordered.extend(node.kwargs.items())
        self.given.update(ordered)
        self.operands: list[tuple[str, Shape]] = []
        self.nodes: list[fx.Node] = []
        for name, value in ordered:
            self._add(name, value)
        self.results = [tuple(t.shape) for t in tensors(node.meta.get("val"))]

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            if isinstance(held, torch.Tensor):
                self.operands.append((name, tuple(held.shape)))
                self.nodes.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                self._add(name, item)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The op's tensor arguments, in the schema's order."""
        return tuple(name for name, holds, _ in _declared(self.op) if holds)

    def has(self, name: str) -> bool:
        """Return whether a tensor was passed for the argument."""
        return any(known == name for known, _ in self.operands)

    def shape(self, name: str) -> Shape:
        """Return the shape of the first tensor passed for the argument."""
        return next(shape for known, shape in self.operands if known == name)

    def value(self, name: str) -> torch.Tensor:
        """Return the abstract value of the first tensor passed for the argument."""
        found = next(i for i, (known, _) in enumerate(self.operands) if known == name)
        held: torch.Tensor = self.nodes[found].meta["val"]
        return held

    def positions(self, names: Iterable[str]) -> frozenset[int]:
        """Return the positions of the operands passed for these arguments."""
        wanted = set(names)
        return frozenset(i for i, (known, _) in enumerate(self.operands) if known in wanted)

    def _is_bool(self, index: int) -> bool:
        return self.nodes[index].meta["val"].dtype is torch.bool

    def number(self, name: str) -> Any:
        """Return an argument's value; the node of a size as its SymInt."""
        value = self.given.get(name)
        return value.meta.get("val") if isinstance(value, fx.Node) else value

    def dim(self, name: str, rank: int) -> int:
        """Return a dim argument, counted from the front."""
        value = self.number(name)
        if not isinstance(value, int):
            raise UncoveredCallError
        return value % max(rank, 1)

    def dims(self, name: str, rank: int) -> set[int]:
        """Return an argument of dims, counted from the front; all dims if it is None or empty."""
        value = self.number(name)
        if value is None or (isinstance(value, list | tuple) and not value):
            return set(range(rank))
        each = value if isinstance(value, list | tuple) else [value]
        return {int(d) % max(rank, 1) for d in each}

    def rule(
        self,
        operands: Mapping[str, Sequence[Dim]] | Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        *,
        sizes: Mapping[str, Size] | None = None,
        whole: Iterable[str] = (),
        additive: Iterable[str] = (),
        linear: Iterable[str | frozenset[int]] = (),
        localise: Localise | None = None,
        forms: Mapping[str, str] | None = None,
        results_of: Mapping[str, tuple[Placement | None, ...]] | None = None,
    ) -> ShardingRule:
        """Return the rule with these dims (by name or in order); sizes come from the shapes.

        sizes: of factors in compound dims. additive: argument names. linear: sets of operands, or
        of argument names separated by spaces; empty sets and sets with booleans are dropped.
        """
        if isinstance(operands, Mapping):
            operands = [operands[name] for name, _ in self.operands]
        known: dict[str, Size] = dict(sizes or {})
        shapes = [shape for _, shape in self.operands]
        inside = tuple(_dims(d, s, known) for d, s in zip(operands, shapes, strict=True))
        outside = tuple(_dims(d, s, known) for d, s in zip(results, self.results, strict=True))
        used = {f for dims in (*inside, *outside) for dim in dims for f in dim}
        sets = [self.positions(s.split()) if isinstance(s, str) else s for s in linear]
        sets = [s for s in sets if not any(self._is_bool(i) for i in s)]
        return ShardingRule(
            operands=inside,
            results=outside,
            sizes={f: size for f, size in known.items() if f in used},
            whole=frozenset(f for f in used if f.startswith("_")) | (used & set(whole)),
            additive=self.positions(additive),
            linear=tuple(dict.fromkeys(s for s in sets if s)),
            localise=localise,
            forms={k: v for k, v in (forms or {}).items() if used.issuperset(k.split())},
            results_of={k: v for k, v in (results_of or {}).items() if k in used},
        )


def _dims(dims: Sequence[Dim], shape: Shape, known: dict[str, Size]) -> Dims:
    """Return dims without factors of size 1, and record the sizes of single factors."""
    found: list[tuple[str, ...]] = []
    if len(dims) != len(shape):
        raise UncoveredCallError
    for dim, size in zip(dims, shape, strict=True):
        if isinstance(dim, tuple):
            found.append(tuple(f for f in dim if not is_one(known[f])))
        elif not dim or is_one(size):
            found.append(())
        else:
            known.setdefault(dim, size)
            found.append((dim,))
    return tuple(found)


def notation(text: str, *, additive: str = "", linear: Sequence[str] = ()) -> Maker:
    """Return a rule function from einsum-like text, with terms in the schema's tensor order.

    ``...`` matches any number of leading dims, right-aligned: ``"... k, n k -> ... n"``. Terms
    of missing tensors are skipped. additive, linear: as in :meth:`SchemaCall.rule`.
    """
    left, _, right = text.partition("->")
    terms, outs = [t.split() for t in left.split(",")], [t.split() for t in right.split(",")]

    def make(call: SchemaCall) -> ShardingRule:
        by_name = dict(zip(call.tensor_names, terms, strict=False))
        inside = [_spread(by_name[name], len(shape)) for name, shape in call.operands]
        outside = [_spread(t, len(s)) for t, s in zip(outs, call.results, strict=True)]
        return call.rule(inside, outside, additive=additive.split(), linear=linear)

    return make


def _spread(term: Sequence[str], rank: int) -> list[Dim]:
    """Return a term's dims with ``...`` expanded to b2 b1 b0."""
    if "..." not in term:
        return ["" if f == "1" else f for f in term]
    at, hidden = term.index("..."), rank - len(term) + 1
    if hidden < 0:
        raise UncoveredCallError
    dots = [f"b{i}" for i in reversed(range(hidden))]
    return [*term[:at], *dots, *term[at + 1 :]]


def name_broadcast_dims(count: int, prefix: str = "b") -> list[Dim]:
    """Return names for ``count`` broadcast dims, equal when counted from the right."""
    return [f"{prefix}{i}" for i in reversed(range(count))]


def is_one(size: Size) -> bool:
    """Return whether a size is 1, without a guard."""
    return isinstance(size, int) and size == 1


def same(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal as expressions, without a guard."""
    return bool(expression(a) == expression(b))


def ratio(a: Size, b: Size) -> Size | None:
    """Return ``a / b`` if it is known to be an integer, as a SymInt if either is one."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    found = _divide(expression(a), expression(b))
    return a // b if isinstance(found, sympy.Expr) else found


@lru_cache(maxsize=4096)
def _divide(a: int | sympy.Expr, b: int | sympy.Expr) -> int | sympy.Expr | None:
    """Return ``a / b`` if it is known to be an integer."""
    if b == 0:
        return None
    above, below = sympy.fraction(sympy.cancel(sympy.sympify(a) / sympy.sympify(b)))
    if below != 1 or not _whole(above):
        return None
    return int(above) if above.is_number else above


def _whole(value: Any) -> bool:
    """Return whether an expression is a polynomial with integer coefficients."""
    try:
        return all(c.is_integer for c in sympy.Poly(value, *value.free_symbols).coeffs())
    except sympy.PolynomialError:
        return False
    except sympy.GeneratorsNeeded:
        return bool(value.is_integer)


def common(sizes: Sequence[Size]) -> int:
    """Return the greatest common divisor of all sizes; 1 if one is symbolic."""
    found = 0
    for size in sizes:
        if not isinstance(size, int):
            return 1
        found = math.gcd(found, size)
    return found


def with_argument(node: fx.Node, arguments: Arguments, name: str, value: Any) -> Arguments:
    """Return ``arguments`` of the node (like node.args and node.kwargs) with one replaced."""
    args, kwargs = arguments
    if name in kwargs:
        return args, {**kwargs, name: value}
    first = 3 if node.target is seeded else 0
    at = first + next(i for i, (known, *_) in enumerate(_declared(op_of(node))) if known == name)
    if at >= len(args):
        return args, {**kwargs, name: value}
    return (*args[:at], value, *args[at + 1 :]), kwargs


def result_size(name: str) -> Localise:
    """Localize the argument ``name`` to the shape of the first result."""

    def localise(
        node: fx.Node, arguments: Arguments, _: Sequence[Shape], results: Sequence[Shape]
    ) -> Arguments:
        return with_argument(node, arguments, name, list(results[0]))

    return localise
