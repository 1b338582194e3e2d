"""A transformer of any depth as a graph, built op by op: for what must hold of large graphs."""

from __future__ import annotations

import operator

import torch
from fxpart.passes.key_random import KeyRandomPass
from inplace_programs import Builder
from torch import fx, nn

from fxpart.compiler import BLOCKS_KEY, LEVEL_KEY, NO_CUT_KEY, BlockInfo, Level
from fxpart.compiler.graph_edit import annotate

aten = torch.ops.aten
OPS_PER_LAYER = 35


def deep(layers: int, width: int = 16, heads: int = 4) -> fx.GraphModule:
    """Attention and a gated feed-forward, ``layers`` times, at level ANNOTATED in one block.

    Weights: ``qkv0``, ``out0``, ``up0``, ``gate0``, ``down0``, ``norm0`` and so on; input ``x``.
    """
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "gate": (4, 1), "down": (1, 4)}
    state = {
        f"{name}{i}": nn.Parameter(torch.empty(a * width, b * width, device="meta"))
        for i in range(layers)
        for name, (a, b) in shapes.items()
    }
    state |= {f"norm{i}": nn.Parameter(torch.empty(width, device="meta")) for i in range(layers)}
    builder = Builder(**state)
    x = builder.input(8, 12, width)
    x.name = "x"
    held = {name: builder.get(name) for name in state}
    for i in range(layers):
        x = _attention(builder, x, held, i, heads)
        x = _feed_forward(builder, x, held, i)
    module = KeyRandomPass().run(builder.finish(x))
    for node in module.graph.nodes:
        if node.op == "call_function":
            annotate(node, block=0, requires_grad=True)
        elif node.op == "get_attr":
            annotate(node, requires_grad=True)
    module.meta[LEVEL_KEY] = Level.ANNOTATED
    module.meta[BLOCKS_KEY], module.meta[NO_CUT_KEY] = (BlockInfo("all", "all"),), ()
    return module


def _norm(builder: Builder, x: fx.Node, weight: fx.Node) -> fx.Node:
    """The root mean square norm in single ops."""
    square = builder.call(aten.mean.dim, builder.call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    scale = builder.call(aten.rsqrt.default, builder.call(aten.add.Tensor, square, 1e-6))
    return builder.call(aten.mul.Tensor, builder.call(aten.mul.Tensor, x, scale), weight)


def _attention(
    builder: Builder, x: fx.Node, held: dict[str, fx.Node], i: int, heads: int
) -> fx.Node:
    call = builder.call
    rows, length, width = x.meta["val"].shape
    y = call(aten.linear.default, _norm(builder, x, held[f"norm{i}"]), held[f"qkv{i}"])
    split = call(aten.split.Tensor, y, width, 2)
    parts = []
    for part in range(3):
        one = call(operator.getitem, split, part)
        shaped = call(aten.view.default, one, [rows, length, heads, width // heads])
        parts.append(call(aten.transpose.int, shaped, 1, 2))
    query, key, value = parts
    scores = call(aten.matmul.default, query, call(aten.transpose.int, key, 2, 3))
    weights = call(aten.softmax.int, call(aten.mul.Tensor, scores, 0.5), -1)
    mixed = call(aten.transpose.int, call(aten.matmul.default, weights, value), 1, 2)
    joined = call(aten.reshape.default, mixed, [rows, length, width])
    return call(aten.add.Tensor, x, call(aten.linear.default, joined, held[f"out{i}"]))


def _feed_forward(builder: Builder, x: fx.Node, held: dict[str, fx.Node], i: int) -> fx.Node:
    call = builder.call
    y = _norm(builder, x, held[f"norm{i}"])
    gate = call(aten.silu.default, call(aten.linear.default, y, held[f"gate{i}"]))
    both = call(aten.mul.Tensor, gate, call(aten.linear.default, y, held[f"up{i}"]))
    return call(aten.add.Tensor, x, call(aten.linear.default, both, held[f"down{i}"]))
