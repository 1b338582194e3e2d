"""Tensors of a graph: the node that computes each, and its result index."""

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
    """Return whether a node takes one item of a tuple or list."""
    return node.op == "call_function" and node.target is operator.getitem


def find_producer(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that computes a tensor and its result index; items belong to their op."""
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
    """Return a node's tensors, in order; none for sizes, the random key and items."""
    if node.op == "output" or is_item(node) or node.name == RNG_KEY:
        return ()
    return tensors(node.meta.get("val"))


def sharding(node: fx.Node) -> NodeSharding | None:
    """Return the node's sharding, if it has one."""
    return annotation(node).sharding
