"""Sizes as expressions: rebuilt inside a stage as fx nodes, or written as text.

One fold over the sympy expression of a symbolic integer serves both. torch's own sympy functions
(``FloorDiv``, ``PythonMod`` ...) are told apart by name, so that no private module is imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

Apply = Callable[[Callable[..., Any], Any, Any], Any]

# Two-argument integer functions of torch's sympy, by class name.
_BINARY: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
}
_CHAINED: dict[str, Callable[..., Any]] = {"Max": max, "Min": min}


class Unsupported(Exception):
    """The expression has a function that is not an integer operation."""


def fold(expr: sympy.Expr, symbol: Callable[[sympy.Symbol], Any], apply: Apply) -> Any:
    """Evaluate an integer expression bottom-up.

    symbol: the value of a symbol. apply: (function of two arguments, left, right) -> value; the
    functions are operator's add, mul, floordiv, mod, pow and the builtins max and min. Integers
    are passed as ints. Raises Unsupported for anything else.
    """
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbol(expr)
    if expr.is_Add or expr.is_Mul:
        top, bottom = _fraction(expr)
        if bottom != 1:
            return apply(operator.floordiv, fold(top, symbol, apply), fold(bottom, symbol, apply))
        terms = expr.as_ordered_terms() if expr.is_Add else expr.as_ordered_factors()
        combine = operator.add if expr.is_Add else operator.mul
        return reduce(lambda a, b: apply(combine, a, b), (fold(t, symbol, apply) for t in terms))
    name = type(expr).__name__
    if name == "Pow" and expr.args[1].is_Integer and expr.args[1] > 0:
        return apply(operator.pow, fold(expr.args[0], symbol, apply), int(expr.args[1]))
    if name in _BINARY and len(expr.args) == 2:
        left, right = (fold(a, symbol, apply) for a in expr.args)
        return apply(_BINARY[name], left, right)
    if name in _CHAINED:
        parts = sorted(expr.args, key=str)
        return reduce(
            lambda a, b: apply(_CHAINED[name], a, b), (fold(p, symbol, apply) for p in parts)
        )
    if name == "ModularIndexing":
        base, divisor, modulus = (fold(a, symbol, apply) for a in expr.args)
        return apply(operator.mod, apply(operator.floordiv, base, divisor), modulus)
    if name in ("TruncToInt", "FloorToInt", "CeilToInt"):
        return _rounded(name, expr.args[0], symbol, apply)
    raise Unsupported(name)


def _fraction(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Numerator and denominator; the expression itself over 1 where it has no quotient."""
    if all(r.is_Integer for r in expr.atoms(sympy.Rational)) and not any(
        p.args[1].is_negative for p in expr.atoms(sympy.Pow)
    ):
        return expr, sympy.Integer(1)
    top, bottom = sympy.fraction(sympy.together(expr))
    return top, bottom


def _rounded(
    name: str, inner: sympy.Expr, symbol: Callable[[sympy.Symbol], Any], apply: Apply
) -> Any:
    """Rounding of a quotient of integers (sizes, so not negative where truncation would differ)."""
    if type(inner).__name__ != "IntTrueDiv":
        raise Unsupported(f"{name} of {type(inner).__name__}")
    top, bottom = (fold(a, symbol, apply) for a in inner.args)
    if name == "CeilToInt":
        negative = apply(operator.floordiv, apply(operator.mul, top, -1), bottom)
        return apply(operator.mul, negative, -1)
    return apply(operator.floordiv, top, bottom)


_TEXT: dict[Callable[..., Any], str] = {
    operator.add: "({} + {})",
    operator.mul: "{}*{}",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.pow: "({})**{}",
    max: "max({}, {})",
    min: "min({}, {})",
}


def expression(size: Any) -> sympy.Expr:
    """The sympy expression of an int or symbolic integer, after torch's replacements."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def dim_text(size: Any) -> int | str:
    """A dim for a spec: an int, or text that :func:`fxpart.program.dim_value` evaluates."""
    expr = expression(size)
    try:
        value = fold(expr, str, lambda f, a, b: _TEXT[f].format(a, b))
    except Unsupported:
        return str(expr)
    return value if isinstance(value, int) else _bare(value)


def _bare(text: str) -> str:
    """Without the outermost brackets of a sum or quotient."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and index < len(text) - 1:
            return text
    return text[1:-1]


def is_size(value: Any) -> bool:
    """Whether a node's value is a number that every stage can compute from shapes alone."""
    if isinstance(value, bool | int | float):
        return True
    symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and not free_unbacked_symbols(value)


def symbols_of(value: Any) -> set[sympy.Symbol]:
    """The symbols that a symbolic number is made of; none for a plain one."""
    if isinstance(value, bool | int | float):
        return set()
    return set(value.node.expr.free_symbols)


def shape_of(value: Any) -> tuple[Any, ...]:
    """The sizes of a (fake) tensor."""
    return tuple(value.shape)


class SizeBuilder:
    """Rebuilds sizes as nodes at the end of a stage's graph, each once.

    sources: per symbol, the node and dim that it is read from, with the dim's expression (the
    symbol itself, or linear in it).
    """

    def __init__(
        self, graph: fx.Graph, sources: dict[sympy.Symbol, tuple[fx.Node, int, sympy.Expr]]
    ) -> None:
        """Nothing is read before it is asked for."""
        self.graph = graph
        self.sources = sources
        self._built: dict[Any, Any] = {}

    def symbol(self, symbol: sympy.Symbol) -> Any:
        """The node that holds a symbol's value."""
        if symbol not in self._built:
            tensor, dim, expr = self.sources[symbol]
            target = torch.ops.aten.sym_size.int
            plain = expr == symbol
            name = str(symbol) if plain else f"{symbol}_size"
            node: Any = self.graph.create_node("call_function", target, (tensor, dim), {}, name)
            if not plain:  # size = factor * symbol + offset
                factor = int(expr.coeff(symbol))
                offset = int(expr.subs(symbol, 0))
                node = self._apply(operator.sub, node, offset) if offset else node
                node = self._apply(operator.floordiv, node, factor) if factor != 1 else node
            self._built[symbol] = node
        return self._built[symbol]

    def integer(self, expr: sympy.Expr) -> Any:
        """An int or the node of an integer expression."""
        if expr not in self._built:
            self._built[expr] = fold(expr, self.symbol, self._apply)
        return self._built[expr]

    def _apply(self, function: Callable[..., Any], left: Any, right: Any) -> Any:
        if not isinstance(left, fx.Node) and not isinstance(right, fx.Node):
            return function(left, right)
        key = (function, left, right)
        if key not in self._built:
            self._built[key] = self.graph.call_function(function, (left, right))
        return self._built[key]


def solvable(expr: sympy.Expr) -> sympy.Symbol | None:
    """The symbol that a dim determines: the dim is ``symbol`` or ``a*symbol + b`` with integers."""
    free = expr.free_symbols
    if len(free) != 1:
        return None
    (symbol,) = free
    factor = expr.coeff(symbol)
    offset = expr.subs(symbol, 0)
    linear = factor.is_Integer and factor > 0 and offset.is_Integer
    return symbol if linear and sympy.expand(factor * symbol + offset - expr) == 0 else None


def readable(
    tensors: Iterable[tuple[Any, Any]],
) -> dict[sympy.Symbol, tuple[Any, int, sympy.Expr]]:
    """Per symbol, the first of (key, fake tensor) pairs with a dim that gives it.

    Plain dims are preferred to linear ones. Returns key, dim and the dim's expression.
    """
    plain: dict[sympy.Symbol, tuple[Any, int, sympy.Expr]] = {}
    linear: dict[sympy.Symbol, tuple[Any, int, sympy.Expr]] = {}
    for key, value in tensors:
        for dim, size in enumerate(shape_of(value)):
            if isinstance(size, int):
                continue
            expr = expression(size)
            if expr.is_Symbol:
                plain.setdefault(expr, (key, dim, expr))
            elif (symbol := solvable(expr)) is not None:
                linear.setdefault(symbol, (key, dim, expr))
    return linear | plain
