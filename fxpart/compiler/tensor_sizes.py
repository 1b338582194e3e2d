"""Tensors of abstract values, and sizes as numbers or sympy expressions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy
import torch


def tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of an op's result, through lists and tuples."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in tensors(item)]
    return []


def nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Return the bytes of the tensor's whole storage."""
    return tensor.untyped_storage().nbytes()


def expression(size: int | torch.SymInt | sympy.Expr) -> int | sympy.Expr:
    """Return a size as an int if it is known, else as a sympy expression in the symbols."""
    if isinstance(size, torch.SymInt):
        return _reduce(size.node.expr)
    return _reduce(size) if isinstance(size, sympy.Expr) else int(size)


@lru_cache(maxsize=4096)
def _reduce(found: sympy.Expr) -> int | sympy.Expr:
    return int(found) if found.is_number else found


def format_size(size: int | torch.SymInt) -> str:
    """Return a size as text; the text of each expression is cached."""
    return _text(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


@lru_cache(maxsize=4096)
def _text(found: sympy.Expr) -> str:
    return str(found)


def hint(size: int | torch.SymInt, fallback: int = 1) -> int:
    """Return the size at the example inputs; ``fallback`` for a data-dependent size."""
    if isinstance(size, int):
        return size
    known: Any = size.node.hint if size.node.has_hint() else None
    return int(known) if known is not None else fallback
