"""Sizes of a rank-local graph: batch symbols denote local sizes, sharded dims are divided."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fxpart.compat import floor_division
from fxpart.compiler.node_annotation import KEY, NodeAnnotation
from fxpart.compiler.size_symbols import UnsupportedExpressionError, expression, fold, readable
from fxpart.sharding import Mesh, Placements, Shard, chunk

from ..rules.outer_parts import read_parts
from .local_values import apply

Size: TypeAlias = int | sympy.Expr


def factors(inputs: Mapping[fx.Node, Placements], mesh: Mesh) -> dict[sympy.Symbol, int]:
    """Return the number of parts of the input dim that each symbol is read from."""
    found: dict[sympy.Symbol, int] = {}
    for symbol, (node, dim, _) in readable((n, n.meta["val"]) for n in inputs).items():
        parts = 1
        for placement, size in zip(inputs[node], mesh.shape, strict=True):
            if isinstance(placement, Shard) and placement.dim == dim:
                parts *= size
        if parts > 1:
            found[symbol] = parts
    return found


class LocalSizes:
    """Global and local sizes of one mesh rank, as ints and expressions in local symbols."""

    def __init__(
        self,
        mesh: Mesh,
        mesh_rank: int,
        parts: Mapping[sympy.Symbol, int],
        symbols: Iterable[sympy.Symbol],
    ) -> None:
        """parts: the result of :func:`factors`. symbols: of all sizes of inputs."""
        self.mesh = mesh
        self._symbols = {str(symbol): symbol for symbol in symbols}
        self.place = mesh.coordinate(mesh_rank)
        self._whole = {symbol: count * symbol for symbol, count in parts.items()}

    def whole(self, size: Any) -> Size:
        """Return a size of the global graph in local symbols."""
        expr = expression(size)
        if expr.is_number:
            return int(expr)
        found: sympy.Expr = expr.xreplace(self._whole) if self._whole else expr
        return found

    def part(self, size: Size, placement: Shard, axis: int) -> Size:
        """Return the local size of a dim sharded over an axis; symbolic sizes divide evenly."""
        parts = self.mesh.shape[axis]
        if isinstance(size, int):
            assert isinstance(placement.outer, int), "a dim with symbolic parts is symbolic"
            rest, left = divmod(size, placement.outer)
            assert left == 0, f"a dim of {size} is not {placement.outer} equal parts"
            start, stop = chunk(rest, parts, self.place[axis])
            return placement.outer * (stop - start)
        quotient = sympy.expand(size / parts)
        if all(term.as_coeff_Mul()[0].is_Integer for term in sympy.Add.make_args(quotient)):
            return quotient
        return floor_division(size, parts)

    def outer(self, placements: Placements, axis: int) -> Size:
        """Return the number of outer parts along an axis, in the dim as earlier axes sharded it."""
        placement = placements[axis]
        assert isinstance(placement, Shard), "only a sharded dim has parts"
        if isinstance(placement.outer, int):
            return placement.outer
        factor, name = read_parts(placement.outer)
        symbol = self._symbols[name]
        found: Size = factor * self._whole.get(symbol, symbol)
        for index, other in enumerate(placements[:axis]):
            if isinstance(other, Shard) and other.dim == placement.dim:
                if isinstance(other.outer, int):
                    found = self.part(found, Shard(0), index)
        return found

    def shape(self, whole: Sequence[Size], placements: Placements) -> list[Size]:
        """Return this rank's shard of a shape (in local symbols)."""
        held = list(whole)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                held[placement.dim] = self.part(held[placement.dim], placement, axis)
        return held


class SizeNodes:
    """Sizes as nodes of the local graph, built once from its inputs, or as SymInts."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
        """inputs: the local placeholders."""
        self.graph = graph
        self._sources = readable((n, n.meta["val"]) for n in inputs)
        self._built: dict[Any, Any] = {}
        self._values: dict[Any, Any] = {}

    def node(self, size: Size) -> Any:
        """Return an int, or the node of an integer expression."""
        if isinstance(size, int):
            return size
        if size not in self._built:
            self._built[size] = fold(size, self._symbol, self._apply)
        return self._built[size]

    def known(self, size: Size) -> bool:
        """Return whether the inputs determine the size."""
        if isinstance(size, int):
            return True
        if not size.free_symbols <= self._sources.keys():
            return False
        try:
            fold(size, lambda s: s, lambda f, a, b: a)
        except UnsupportedExpressionError:
            return False
        return True

    def value(self, size: Size) -> int | torch.SymInt:
        """Return an int or a SymInt for fake tensors; the graph is unchanged."""
        if isinstance(size, int):
            return size
        if size not in self._values:
            self._values[size] = fold(size, self._symint, apply)
        found: int | torch.SymInt = self._values[size]
        return found

    def _symint(self, symbol: sympy.Symbol) -> Any:
        node, dim, expr = self._sources[symbol]
        found = node.meta["val"].shape[dim]
        if expr == symbol:
            return found
        return (found - int(expr.subs(symbol, 0))) // int(expr.coeff(symbol))

    def _symbol(self, symbol: sympy.Symbol) -> Any:
        if symbol not in self._built:
            source, dim, expr = self._sources[symbol]
            node: Any = self._add(torch.ops.aten.sym_size.int, (source, dim))
            if expr != symbol:  # size = factor * symbol + offset
                offset, factor = int(expr.subs(symbol, 0)), int(expr.coeff(symbol))
                node = self._apply(operator.sub, node, offset) if offset else node
                node = self._apply(operator.floordiv, node, factor) if factor != 1 else node
            self._built[symbol] = node
        return self._built[symbol]

    def _apply(self, function: Callable[..., Any], left: Any, right: Any) -> Any:
        if not isinstance(left, fx.Node) and not isinstance(right, fx.Node):
            return function(left, right)
        key = (function, left, right)
        if key not in self._built:
            self._built[key] = self._add(function, (left, right))
        return self._built[key]

    def _add(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        node = self.graph.call_function(function, args)
        given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        if function is torch.ops.aten.sym_size.int:
            node.meta["val"] = given[0].shape[given[1]]
        else:
            node.meta["val"] = apply(function, *given)
        node.meta[KEY] = NodeAnnotation()
        return node
