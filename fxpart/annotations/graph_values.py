"""The tensors of a graph: which node makes each, and which of its results it is."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpart.compiler.graph_edit import annotation
from fxpart.compiler.node_annotation import RNG_KEY, NodeSharding
from fxpart.compiler.tensor_sizes import tensors


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one item of a tuple or list that an op gave."""
    return node.op == "call_function" and node.target is operator.getitem


def find_producer(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that makes a tensor and which of its results it is: items belong to their op."""
    index = 0
    while is_item(node):
        parent, item = node.args
        assert isinstance(parent, fx.Node)
        held: Any = parent.meta.get("val")
        if not isinstance(held, (list, tuple)) or not isinstance(item, int):
            break
        index += sum(len(tensors(part)) for part in held[: item % len(held)])
        node = parent
    return node, index


def list_result_tensors(node: fx.Node) -> Sequence[torch.Tensor]:
    """The tensors that a node gives, in order; none for sizes, the random key and items."""
    if node.op == "output" or is_item(node) or node.name == RNG_KEY:
        return ()
    return tensors(node.meta.get("val"))


def sharding(node: fx.Node) -> NodeSharding | None:
    """The node's sharding, if it has one."""
    return annotation(node).sharding
