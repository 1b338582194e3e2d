"""Numbers of outer parts of a dim: an int, or text for a symbolic size such as "s0" or "2*s0".

A dim of [batch, sequence] whose sequence is sharded has as many outer parts as the batch has rows.
"""

from __future__ import annotations

import re

import sympy
import torch

from fxpart.compiler.tensor_sizes import expression

_TEXT = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)\Z")


def read_parts(parts: int | str) -> tuple[int, str]:
    """Return the factor and the name of the symbol; "" where there is none."""
    if isinstance(parts, int):
        return parts, ""
    found = _TEXT.match(parts)
    assert found is not None, f"{parts!r} is a size"
    return int(found[1] or 1), found[2]


def multiply_parts(parts: int | str, size: int | torch.SymInt | str) -> int | str | None:
    """Return the product; None where it has two symbols, or another form."""
    text = size if isinstance(size, int | str) else _describe(expression(size))
    if text is None:
        return None
    (a, name), (b, other) = read_parts(parts), read_parts(text)
    return None if name and other else _join(a * b, name or other)


def divide_parts(parts: int | str, by: int | str) -> int | str | None:
    """Return the quotient where it is a number of parts."""
    (a, name), (b, other) = read_parts(parts), read_parts(by)
    if a % b or (other and name != other):
        return None
    return _join(a // b, "" if other else name)


def divides(parts: int | str, size: int | torch.SymInt) -> bool:
    """Return whether a size is several times so many parts, for all values of the symbols."""
    expr = expression(size)
    factor, name = read_parts(parts)
    if isinstance(expr, int):
        return not name and expr % factor == 0 and expr > factor
    symbols = [symbol for symbol in expr.free_symbols if str(symbol) == name]
    if name and not symbols:
        return False
    quotient = sympy.cancel(expr / sympy.Mul(factor, *symbols))
    return bool(quotient != 1 and sympy.fraction(quotient)[1] == 1)


def _describe(expr: int | sympy.Expr) -> int | str | None:
    if isinstance(expr, int):
        return expr
    factor, rest = expr.as_coeff_Mul()
    return _join(int(factor), str(rest)) if rest.is_Symbol and factor.is_Integer else None


def _join(factor: int, name: str) -> int | str:
    if not name:
        return factor
    return name if factor == 1 else f"{factor}*{name}"
