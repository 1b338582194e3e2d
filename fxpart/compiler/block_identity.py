"""Structural identity of blocks: ops, arguments, shapes and gradients, but not names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import is_op, op_args, op_of
from fxpart.compiler.graph_edit import annotation, value
from fxpart.compiler.tensor_sizes import format_size, tensors


def identity(nodes: Sequence[fx.Node]) -> str:
    """Return a hex digest that is equal for blocks with the same ops, shapes and data flow."""
    local: dict[fx.Node, str] = {}
    inside = set(nodes)
    lines = []
    for node in nodes:
        lines.append(_line(node, local))
        local[node] = f"%{len(local)}"
    escaping = [local[n] for n in nodes if any(u not in inside for u in n.users)]
    return hashlib.sha256("\n".join([*lines, *escaping]).encode()).hexdigest()[:16]


def _line(node: fx.Node, local: dict[fx.Node, str]) -> str:
    """Describe one op: name, arguments, result, gradient and saved tensors."""
    note = annotation(node)

    def text(item: Any) -> str:
        if isinstance(item, fx.Node):
            if item not in local:
                local[item] = f"${len(local)}:{item.op}:{_value(item)}"
            return local[item]
        if isinstance(item, (list, tuple)):
            return "[" + ",".join(text(i) for i in item) + "]"
        if isinstance(item, dict):
            return "{" + ",".join(f"{k}={text(v)}" for k, v in sorted(item.items())) + "}"
        return f"{type(item).__name__}:{item}"

    saved = ",".join(str(s.size) for s in note.saved)
    random = "random" if note.random is not None else ""
    target = op_of(node)
    op_name = str(target) if is_op(target) else getattr(target, "__name__", "")
    arguments = f"{text(op_args(node))},{text(dict(node.kwargs))}"
    return f"{op_name}({arguments})->{_value(node)} {random} [{saved}]"


def _value(node: fx.Node) -> str:
    """Describe the shapes, strides, dtypes and gradient of a node's value."""
    result = value(node)
    parts = [
        f"{t.dtype}{list(map(format_size, t.shape))}{list(map(format_size, t.stride()))}"
        for t in tensors(result)
    ]
    grad = annotation(node).requires_grad
    return "|".join(parts) + (":grad" if grad else "") if parts else f"number:{_number(result)}"


def _number(size: Any) -> str:
    """Return a size as text."""
    return str(size) if isinstance(size, (int, float, bool, torch.SymInt)) else type(size).__name__
