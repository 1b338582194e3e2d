"""Size expressions: rebuilt as FX nodes inside a stage, or written as text.

Both fold over the sympy expression of a symbolic integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from fxpart.compat import has_unbacked_symbols
from fxpart.compiler.size_symbols import UnsupportedExpressionError, expression, fold

__all__ = ["UnsupportedExpressionError", "dim_text", "expression", "fold", "is_size"]

_TEXT: dict[Callable[..., Any], str] = {
    operator.add: "({} + {})",
    operator.mul: "{}*{}",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.pow: "({})**{}",
    max: "max({}, {})",
    min: "min({}, {})",
}


def dim_text(size: Any) -> int | str:
    """Return a dim as an int, or as text that :func:`fxpart.program.dim_value` evaluates."""
    expr = expression(size)
    try:
        value = fold(expr, str, _text)
    except UnsupportedExpressionError:
        return str(expr)
    return value if isinstance(value, int) else _bare(value)


def _text(do: Callable[..., Any], left: Any, right: Any) -> str:
    """Format one operation; parenthesize products after a division, since // and * bind alike."""
    if do in (operator.floordiv, operator.mod) and "*" in str(right):
        right = f"({_bare(str(right))})"
    return _TEXT[do].format(left, right)


def _bare(text: str) -> str:
    """Remove the outermost parentheses of a sum or quotient."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and index < len(text) - 1:
            return text
    return text[1:-1]


def is_size(value: Any) -> bool:
    """Return whether a value is a number that every stage can compute from shapes alone."""
    if isinstance(value, bool | int | float):
        return True
    symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return symbolic and not has_unbacked_symbols(value)
