"""Totals of the whole batch, as a separate graph that computes them from inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpart.compiler.graph_edit import add_call


@dataclass(frozen=True)
class TotalInputs:
    """Inputs of a divided graph beyond the user's inputs.

    graph: computes totals of the whole batch from inputs and constants; returns them as a tuple.
    names: the placeholders of the divided graph for them, in order. shares: placeholders for the
    microbatch's fraction of the batch's rows, with their dtypes ("float32"). module: has the
    constants that the graph reads.
    """

    graph: fx.Graph
    names: tuple[str, ...]
    shares: tuple[tuple[str, str], ...]
    module: fx.GraphModule

    @property
    def inputs(self) -> tuple[str, ...]:
        """All placeholders that the runtime computes."""
        return (*self.names, *(name for name, _ in self.shares))


class TotalsGraph:
    """A graph of totals under construction."""

    def __init__(self, mode: Any) -> None:
        """mode: the fake-tensor mode of the source graph."""
        self.graph = fx.Graph()
        self._mode = mode
        self._copies: dict[fx.Node, fx.Node] = {}

    def copied(self, node: fx.Node) -> fx.Node:
        """Copy a node of the other graph, with all nodes that it needs."""
        todo = [node]
        while todo:
            top = todo[-1]
            missing = [a for a in top.all_input_nodes if a not in self._copies]
            if missing and top not in self._copies:
                todo += missing
                continue
            todo.pop()
            if top not in self._copies:
                self._copies[top] = self._copy(top)
        return self._copies[node]

    def note(self, taken: fx.Node, total: fx.Node) -> None:
        """Record that an input of the other graph takes a total of this one."""
        self._copies[taken] = total

    def add(self, like: fx.Node) -> Callable[[Any, tuple[Any, ...]], fx.Node]:
        """Return a function that adds a call with the annotations of ``like``."""

        def add(target: Any, args: tuple[Any, ...]) -> fx.Node:
            return add_call(self.graph, target, args, like=like, mode=self._mode)

        return add

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            first = next(iter(self.graph.nodes), None)
            with self.graph.inserting_before(first):
                made = self.graph.placeholder(node.name)
            made.meta = dict(node.meta)
            return made
        return self.graph.node_copy(node, self._copies.__getitem__)
