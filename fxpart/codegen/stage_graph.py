"""Graph of one stage: copied ops, added inputs and state, rebuilt sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxpart.codegen.dataflow import format_node
from fxpart.codegen.size_builder import SizeBuilder, readable
from fxpart.codegen.size_expressions import UnsupportedExpressionError, expression, fold, is_size
from fxpart.compiler import RNG_KEY
from fxpart.errors import error

Source = tuple[fx.Node, int, sympy.Expr]


@dataclass(frozen=True)
class StageSubgraph:
    """The part of the whole graph that one stage computes.

    ops: in order. inputs: user inputs that the ops read. crossing: values of earlier stages.
    outputs: each with the stages that receive it. symbols: the user inputs that determine each
    symbol.
    """

    index: int
    ops: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    crossing: tuple[fx.Node, ...]
    outputs: tuple[tuple[fx.Node, tuple[int, ...]], ...]
    symbols: dict[sympy.Symbol, Source]

    @property
    def state(self) -> tuple[str, ...]:
        """The state names that the stage reads or returns, in order of use."""
        nodes = [a for n in self.ops for a in n.all_input_nodes]
        nodes += [n for n, _ in self.outputs]
        return tuple(dict.fromkeys(str(n.target) for n in nodes if n.op == "get_attr"))


@dataclass(frozen=True)
class BuiltStageGraph:
    """The built graph, its inputs (nodes of the whole graph) in order, and its state names."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    state: tuple[str, ...]


def build_graph(part: StageSubgraph) -> BuiltStageGraph:
    """Copy a stage's ops into a graph ``(key, *inputs) -> outputs``.

    A symbol is read from the first input of the stage with a suitable dim; otherwise the user input
    that defines it becomes an input of the stage.
    """
    returned = [n for n, _ in part.outputs if n.op == "placeholder"]
    inputs = list(dict.fromkeys([*part.inputs, *returned, *part.crossing]))
    symbols = set().union(*(_needed(value) for node in part.ops for value in _sizes(node)))
    own = readable((n, n.meta["val"]) for n in inputs)
    extra = {}
    for symbol in sorted(symbols - own.keys(), key=str):
        if symbol not in part.symbols:
            raise error(
                "FXP900",
                where=f"stage {part.index}",
                why=f"no input has the size {symbol}",
            )
        extra[symbol] = part.symbols[symbol]
    inputs = list(dict.fromkeys([*(source[0] for source in extra.values()), *inputs]))
    return _StageGraphBuilder(part, inputs, {**extra, **own}).build()


def _sizes(node: fx.Node) -> Iterator[Any]:
    """Yield the sizes among a node's arguments: size nodes and symbolic integers."""
    found: list[Any] = []

    def visit(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value.op.startswith("call") and is_size(value.meta.get("val")):
                found.append(value)
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            found.append(value)
        return value

    map_aggregate((node.args, node.kwargs), visit)
    yield from found


def _needed(size: Any) -> set[sympy.Symbol]:
    """Return the symbols needed to rebuild a size."""
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    if isinstance(value, bool | int | float):
        return set()
    if isinstance(value, torch.SymInt) and _integer(value):
        return set(expression(value).free_symbols)
    if isinstance(size, fx.Node):
        return set().union(*(_needed(inner) for inner in _sizes(size)))
    return set(value.node.expr.free_symbols)


def _integer(value: torch.SymInt) -> bool:
    try:
        fold(expression(value), lambda s: s, lambda f, a, b: a)
    except UnsupportedExpressionError:
        return False
    return True


class _StageGraphBuilder:
    """Builds one stage's graph, op by op."""

    def __init__(
        self, part: StageSubgraph, inputs: list[fx.Node], sources: dict[sympy.Symbol, Source]
    ) -> None:
        self.part = part
        self.inputs = inputs
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.key = self.graph.placeholder(RNG_KEY)
        for node in inputs:
            self.env[node] = self.graph.placeholder(node.name)
            self.env[node].meta = dict(node.meta)
        self.state: dict[str, fx.Node] = {}
        self.sizes = SizeBuilder(
            self.graph, {s: (self.env[n], dim, expr) for s, (n, dim, expr) in sources.items()}
        )

    def build(self) -> BuiltStageGraph:
        """Copy all ops, then add the outputs."""
        for node in self.part.ops:
            self.env[node] = self._copy(node)
        self.graph.output(tuple(self._value(node) for node, _ in self.part.outputs))
        return BuiltStageGraph(self.graph, tuple(self.inputs), tuple(self.state))

    def _copy(self, node: fx.Node) -> fx.Node:
        args = map_aggregate(node.args, self._argument(node))
        kwargs = map_aggregate(node.kwargs, self._argument(node))
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
        return new

    def _argument(self, user: fx.Node) -> Any:
        def replace(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._value(value)
            if isinstance(value, torch.SymInt):
                return self._size(value, user)
            if isinstance(value, torch.SymFloat | torch.SymBool):
                raise _unsupported(user, value)
            return value

        return replace

    def _value(self, node: fx.Node) -> Any:
        """Return the stage's node (or number) for a node of the whole graph."""
        if node in self.env:
            return self.env[node]
        if node.op == "placeholder":  # all others were added before
            return self.key
        if node.op == "get_attr":
            name = str(node.target)
            if name not in self.state:
                self.state[name] = self.graph.get_attr(name)
                self.state[name].meta = dict(node.meta)
            return self.state[name]
        self.env[node] = self._size_node(node)
        return self.env[node]

    def _size_node(self, node: fx.Node) -> Any:
        """Rebuild a size: integers from their expression, other numbers by the same operation."""
        value = node.meta["val"]
        if isinstance(value, bool | int | float):
            return value
        if isinstance(value, torch.SymInt) and _integer(value):
            return self.sizes.integer(expression(value))
        if any(isinstance(a.meta.get("val"), torch.Tensor) for a in node.all_input_nodes):
            raise _unsupported(node, value)
        return self._copy(node)

    def _size(self, value: torch.SymInt, user: fx.Node) -> Any:
        if not _integer(value):
            raise _unsupported(user, value)
        return self.sizes.integer(expression(value))


def _unsupported(node: fx.Node, value: Any) -> Exception:
    return error(
        "FXP108",
        where=format_node(node),
        why=f"the size {value} is not an integer expression of the inputs' sizes",
        fix="compute it with //, %, +, - and * from the inputs' shapes",
    )
