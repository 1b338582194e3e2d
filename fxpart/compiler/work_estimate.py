"""Rough estimate of an op's work, used only to group ops; costs come from cost models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import is_op, op_args, op_of, packet_name, tensors_in
from fxpart.compiler.graph_edit import value
from fxpart.compiler.tensor_sizes import hint, tensors

_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "linear", "addmm", "mm", "bmm", "baddbmm", "addbmm", "matmul", "einsum", "bilinear", "mv",
        "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu",
        "embedding", "embedding_bag", "_embedding_bag", "cross_entropy_loss", "_grouped_mm",
        "grouped_mm", "multi_head_attention_forward", "tensordot", "_native_multi_head_attention",
    )
)  # fmt: skip


def is_heavy(node: fx.Node) -> bool:
    """Return whether blocks form around the op: a matrix product, a lookup or a loss over classes.

    Ops of other packages count as compute-intensive.
    """
    target = op_of(node)
    return packet_name(target) in _PRODUCTS or (is_op(target) and target.namespace != "aten")


def numel(tensor: torch.Tensor) -> int:
    """Return the number of elements at the example inputs."""
    return math.prod(hint(s) for s in tensor.shape)


def nbytes(result: Any) -> int:
    """Return the bytes of all tensors of a value at the example inputs."""
    return sum(numel(t) * t.element_size() for t in tensors(result))


def work(node: fx.Node) -> int:
    """Return the multiplications at the example inputs: results times the reduction length."""
    out = sum(numel(t) for t in tensors(value(node)))
    if not is_heavy(node):
        return out
    name = packet_name(op_of(node)).removeprefix("aten.")
    given = [t for n in tensors_in(op_args(node)) for t in tensors(value(n))]
    if "embedding" in name or name == "cross_entropy_loss" or len(given) < 2:
        return out + numel(given[0])
    if name == "fxpart.experts":
        each = sum(numel(t) // max(1, hint(t.shape[0])) for t in given[3:5])
        return numel(given[1]) * each
    if name == "scaled_dot_product_attention":
        return 2 * numel(given[0]) * hint(given[1].shape[-2])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return (
            numel(given[0]) * sum(numel(t) for t in given[1:]) // max(1, hint(given[0].shape[-1]))
        )
    if "conv" in name:
        # Each result element sums one filter; if transposed, each input element spreads over one.
        filters = max(1, hint(given[1].shape[0]))
        ends = numel(given[0]) if "transpose" in name else out
        return ends * numel(given[1]) // filters
    position = 1 if name in ("addmm", "baddbmm", "addbmm") else 0
    return out * hint(given[position].shape[-1]) if given[position].dim() else out
