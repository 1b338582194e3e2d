"""Read size symbols from a stage's inputs, and rebuild size computations as nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from fxpart.compiler.size_symbols import fold, readable, solvable

__all__ = ["SizeBuilder", "readable", "solvable"]


class SizeBuilder:
    """Rebuilds sizes as nodes at the end of a stage's graph, each once.

    sources: per symbol, the node and dim to read it from, with the dim's expression (the symbol
    itself, or linear in it).
    """

    def __init__(
        self, graph: fx.Graph, sources: dict[sympy.Symbol, tuple[fx.Node, int, sympy.Expr]]
    ) -> None:
        """Start without nodes; they are created on demand."""
        self.graph = graph
        self.sources = sources
        self._built: dict[Any, Any] = {}

    def symbol(self, symbol: sympy.Symbol) -> Any:
        """Return the node with a symbol's value."""
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
        """Return an int, or the node of an integer expression."""
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
