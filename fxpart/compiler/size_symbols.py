"""Integer size expressions: evaluation, and the input dims that determine their symbols.

torch's sympy functions (``FloorDiv``, ``PythonMod`` ...) are recognized by class name, so that no
private module is imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import sympy

Apply = Callable[[Callable[..., Any], Any, Any], Any]

# Two-argument integer functions of torch's sympy, by class name.
_BINARY: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
}
_CHAINED: dict[str, Callable[..., Any]] = {"Max": max, "Min": min}


class UnsupportedExpressionError(Exception):
    """Raised for an expression with a function that is not an integer operation."""


def fold(expr: sympy.Expr, symbol: Callable[[sympy.Symbol], Any], apply: Apply) -> Any:
    """Evaluate an integer expression bottom-up.

    symbol: the value of a symbol. apply: (function of two arguments, left, right) -> value; the
    functions are operator's add, mul, floordiv, mod, pow and the builtins max and min. Integers
    are passed as ints. Raises UnsupportedExpressionError for anything else.
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
    raise UnsupportedExpressionError(name)


def _fraction(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return numerator and denominator; the expression itself over 1 if it has no quotient."""
    if all(r.is_Integer for r in expr.atoms(sympy.Rational)) and not any(
        p.args[1].is_negative for p in expr.atoms(sympy.Pow)
    ):
        return expr, sympy.Integer(1)
    top, bottom = sympy.fraction(sympy.together(expr))
    return top, bottom


def _rounded(
    name: str, inner: sympy.Expr, symbol: Callable[[sympy.Symbol], Any], apply: Apply
) -> Any:
    """Round a quotient of integers; sizes are not negative, so truncation equals floor."""
    if type(inner).__name__ != "IntTrueDiv":
        raise UnsupportedExpressionError(f"{name} of {type(inner).__name__}")
    top, bottom = (fold(a, symbol, apply) for a in inner.args)
    if name == "CeilToInt":
        negative = apply(operator.floordiv, apply(operator.mul, top, -1), bottom)
        return apply(operator.mul, negative, -1)
    return apply(operator.floordiv, top, bottom)


def expression(size: Any) -> sympy.Expr:
    """Return the sympy expression of an int or symbolic integer, after torch's replacements."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def solvable(expr: sympy.Expr) -> sympy.Symbol | None:
    """Return the symbol of a dim with the form ``symbol`` or ``a*symbol + b``; else None."""
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
    """Map each symbol to the first of the (key, fake tensor) pairs that has a dim to read it from.

    A dim equal to the symbol is preferred to a linear one. Values are key, dim and the dim's
    expression.
    """
    plain: dict[sympy.Symbol, tuple[Any, int, sympy.Expr]] = {}
    linear: dict[sympy.Symbol, tuple[Any, int, sympy.Expr]] = {}
    for key, value in tensors:
        for dim, size in enumerate(value.shape):
            if isinstance(size, int):
                continue
            expr = expression(size)
            if expr.is_Symbol:
                plain.setdefault(expr, (key, dim, expr))
            elif (symbol := solvable(expr)) is not None:
                linear.setdefault(symbol, (key, dim, expr))
    return linear | plain
