"""Compute a graph digest that is equal in every process and on every machine.

It covers ops, arguments, shapes, strides, dtypes, gradients, state names, inputs and blocks, but
not node names, source lines, devices, addresses or the order of symbols.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import fx

from fxpart.compiler import NodeAnnotation
from fxpart.compiler.effects import is_op
from fxpart.compiler.graph_edit import annotation, value


def fingerprint(graph_module: fx.GraphModule) -> str:
    """Return the SHA-256 hex digest of the graph's canonical lines."""
    digest = hashlib.sha256()
    for line in canonical_lines(graph_module):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def canonical_lines(graph_module: fx.GraphModule) -> Iterator[str]:
    """Yield one line of text per node, in order."""
    writer = _CanonicalGraphWriter(graph_module)
    for node in graph_module.graph.nodes:
        yield writer.line(node)


@dataclass
class _CanonicalGraphWriter:
    """Numbers nodes and symbols in order of appearance."""

    root: torch.nn.Module
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    symbols: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)

    def line(self, node: fx.Node) -> str:
        """Return op, target, arguments -> value, gradient, block."""
        self.numbers[node] = len(self.numbers)
        known: NodeAnnotation = annotation(node)
        parts = [node.op, self._target(node)]
        if node.op in ("call_function", "output"):
            parts += [self._text(node.args), self._text(dict(node.kwargs))]
        if node.op != "output":
            parts += ["->", self._text(value(node)), "grad" if known.requires_grad else ""]
        parts.append("" if known.block is None else f"block {known.block}")
        return " ".join(p for p in parts if p)

    def _target(self, node: fx.Node) -> str:
        """Return a target name that does not depend on the process."""
        if node.op == "get_attr":
            attribute = attrgetter(str(node.target))(self.root)
            kind = type(attribute).__name__ if isinstance(attribute, fx.GraphModule) else ""
            body = fingerprint(attribute) if kind else ""
            trained = "trained" if getattr(attribute, "requires_grad", False) else ""
            return f"{node.target} {kind}{body}{trained}".strip()
        return _callable_name(node.target)

    def _text(self, item: Any) -> str:
        """Return an argument or value as text, exact for every type in a graph."""
        if isinstance(item, fx.Node):
            return f"%{self.numbers[item]}"
        if isinstance(item, torch.Tensor):
            shape, strides = self._text(tuple(item.shape)), self._text(item.stride())
            return f"{item.dtype}{shape}{strides}"
        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            known = item.node.expr
            return f"int:{known}" if known.is_Integer else self._expression(known)
        if isinstance(item, (list, tuple)):
            return "[" + ",".join(self._text(i) for i in item) + "]"
        if isinstance(item, dict):
            return "{" + ",".join(f"{k}:{self._text(v)}" for k, v in sorted(item.items())) + "}"
        if isinstance(item, slice):
            return f"slice({self._text([item.start, item.stop, item.step])})"
        if isinstance(item, torch.device):
            return "device"
        if callable(item):
            return _callable_name(item)
        return f"{type(item).__name__}:{item!r}"

    def _expression(self, expression: Any) -> str:
        """Return a size with symbols named in order of appearance."""
        for symbol in sorted(getattr(expression, "free_symbols", ()), key=lambda s: str(s)):
            self.symbols.setdefault(symbol, sympy.Symbol(f"d{len(self.symbols)}", integer=True))
        renamed = expression.xreplace(self.symbols) if self.symbols else expression
        return str(renamed)


def _callable_name(target: str | Callable[..., Any]) -> str:
    """Return the name of an op, a function or an input."""
    if isinstance(target, str) or is_op(target):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
