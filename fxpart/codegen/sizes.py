"""Sizes as expressions: rebuilt inside a stage as fx nodes, or written as text.

One fold over the sympy expression of a symbolic integer serves both. torch's own sympy functions
(``FloorDiv``, ``PythonMod`` ...) are told apart by name, so that no private module is imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch

from fxpart.compat import has_unbacked_symbols

Apply = Callable[[Callable[..., Any], Any, Any], Any]

# Two-argument integer functions of torch's sympy, by class name.
_BINARY: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
}
_CHAINED: dict[str, Callable[..., Any]] = {"Max": max, "Min": min}


class UnsupportedError(Exception):
    """The expression has a function that is not an integer operation."""


def fold(expr: sympy.Expr, symbol: Callable[[sympy.Symbol], Any], apply: Apply) -> Any:
    """Evaluate an integer expression bottom-up.

    symbol: the value of a symbol. apply: (function of two arguments, left, right) -> value; the
    functions are operator's add, mul, floordiv, mod, pow and the builtins max and min. Integers
    are passed as ints. Raises UnsupportedError for anything else.
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
    raise UnsupportedError(name)


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
        raise UnsupportedError(f"{name} of {type(inner).__name__}")
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
    except UnsupportedError:
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
    return symbolic and not has_unbacked_symbols(value)


def symbols_of(value: Any) -> set[sympy.Symbol]:
    """The symbols that a symbolic number is made of; none for a plain one."""
    if isinstance(value, bool | int | float):
        return set()
    return set(value.node.expr.free_symbols)
