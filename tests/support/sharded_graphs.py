"""Small models and random graphs to be sharded, and what tests ask of them."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from fxpart.passes import PREPARE, all_passes
from hypothesis import strategies as st
from inplace_programs import Builder
from torch import fx, nn
from torch.nn import functional

from fxpart.annotations.graph_values import find_producer, list_result_tensors, sharding
from fxpart.annotations.model import explain_invalid_placement
from fxpart.capture import capture
from fxpart.compiler import NodeSharding, PassManager
from fxpart.sharding import Mesh, Placement, Replicate, Shard

aten = torch.ops.aten


class FeedForward(nn.Module):
    """A residual feed-forward block with its norm."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class SelfAttention(nn.Module):
    """A residual attention block; ``fused``: one weight for query, key and value."""

    def __init__(self, width: int = 8, heads: int = 4, *, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm = nn.LayerNorm(width)
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        parts = self.qkv(y).chunk(3, -1) if self.fused else (self.q(y), self.k(y), self.v(y))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


MODELS = {
    "mlp": FeedForward,
    "attention": SelfAttention,
    "fused": lambda: SelfAttention(fused=True),
    "layer": Layer,
}


@cache
def small(name: str) -> fx.GraphModule:
    """One of MODELS, prepared; not to be changed."""
    captured = capture(MODELS[name](), (torch.randn(4, 6, 8),), batch_size=4)
    return PassManager(all_passes()).run(PREPARE, captured.graph)


def annotated(graph: fx.GraphModule, mesh: str, seeds: Mapping[str, str]) -> fx.GraphModule:
    """After the pass ``annotate``."""
    text = f"annotate{{mesh={json.dumps(mesh)},seeds={json.dumps(json.dumps(dict(seeds)))}}}"
    return PassManager(all_passes()).run(text, graph)


def propagated(
    graph: fx.GraphModule, mesh: str, seeds: Mapping[str, str], *, close: bool = False
) -> fx.GraphModule:
    """After ``annotate`` and ``propagate``."""
    option = "{close=true}" if close else ""
    return PassManager(all_passes()).run("propagate" + option, annotated(graph, mesh, seeds))


def shardings(graph: fx.GraphModule) -> dict[str, NodeSharding]:
    """By node name."""
    return {n.name: held for n in graph.graph.nodes if (held := sharding(n)) is not None}


def node(graph: fx.GraphModule, name: str) -> fx.Node:
    """A node by its name, or a parameter or buffer by its own."""
    return next(n for n in graph.graph.nodes if name in (n.name, str(n.target)))


def placed(graph: fx.GraphModule, name: str, axis: int = 0) -> str:
    """How the (only) tensor of a node lies along an axis, as text; "?" while open."""
    made, index = find_producer(node(graph, name))
    held = sharding(made)
    assert held is not None
    return str(held.results[index][axis] or "?")


def strategy(graph: fx.GraphModule, name: str, axis: int = 0) -> str | None:
    """What an axis cuts of an op."""
    held = sharding(node(graph, name))
    assert held is not None
    return held.strategy[axis]


def calls(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    """The calls of ``linear`` and the like, in order; random ops by the op inside."""
    return [n for n in graph.graph.nodes if n.op == "call_function" and f".{op}." in _target(n)]


def _target(node: fx.Node) -> str:
    inner = node.args[2] if node.args and getattr(node.target, "__name__", "") == "seeded" else None
    return f".{inner or node.target}."


def shuffled(graph: fx.GraphModule, seed: int) -> fx.GraphModule:
    """The same nodes in another order that the dependences allow (inputs stay first)."""
    draw = random.Random(seed)
    result, copies = fx.Graph(), {}
    todo = list(graph.graph.nodes)
    while todo:
        ready = [n for n in todo if all(a in copies for a in n.all_input_nodes)]
        inputs = [n for n in ready if n.op == "placeholder"]
        rest = [n for n in ready if n.op != "output"] or ready
        chosen = inputs[0] if inputs else draw.choice(rest)
        copies[chosen] = result.node_copy(chosen, copies.__getitem__)
        todo.remove(chosen)
    made = fx.GraphModule(graph, result)
    made.meta = dict(graph.meta)
    assert {n.name for n in result.nodes} == {n.name for n in graph.graph.nodes}
    return made


@dataclass(frozen=True)
class Drawn:
    """A random graph of ruled ops with random annotations."""

    graph: fx.GraphModule
    mesh: str
    seeds: dict[str, str]


@st.composite
def drawn_graphs(draw: st.DrawFn, most: int = 14) -> Drawn:
    """Ops on tensors ``[a, b, c]`` and ``[a, b * c]``; annotations that each value can have."""
    parameters = {f"w{i}": nn.Parameter(torch.randn(8, 8)) for i in range(3)}
    parameters["v0"] = nn.Parameter(torch.randn(8))
    builder = Builder(**parameters, mask=torch.ones(8, 8))
    values = [builder.input(4, 8, 8), builder.input(4, 8, 8)]
    state = {name: builder.get(name) for name in builder.state}
    for _ in range(draw(st.integers(3, most))):
        values.append(_drawn_op(draw, builder, values, state))
    graph = builder.finish(*draw(st.lists(st.sampled_from(values[2:]), min_size=1, max_size=3)))
    graph = PassManager(all_passes()).run("key_random,mark_gradients,group_blocks", graph)
    mesh = draw(st.sampled_from(["a=2", "a=2,b=2", "a=4,b=2"]))
    return Drawn(graph, mesh, _drawn_seeds(draw, graph, Mesh.parse(mesh)))


def _drawn_op(
    draw: st.DrawFn, builder: Builder, values: list[fx.Node], state: Mapping[str, fx.Node]
) -> fx.Node:
    """One more value of shape [4, 8, 8]."""
    x, y = (draw(st.sampled_from(values)) for _ in range(2))
    weight = state[draw(st.sampled_from(["w0", "w1", "w2"]))]
    kind = draw(st.integers(0, 11))
    if kind <= 2:
        bias = draw(st.sampled_from([None, state["v0"]]))
        return builder.call(aten.linear.default, x, weight, bias)
    if kind == 3:
        return builder.call(aten.bmm.default, x, y)
    if kind == 4:
        return builder.call(aten.add.Tensor, x, y)
    if kind == 5:
        return builder.call(aten.gelu.default, x)
    if kind == 6:
        return builder.call(aten.softmax.int, x, draw(st.integers(0, 2)))
    if kind == 7:
        return builder.call(aten.transpose.int, x, 1, 2)
    if kind == 8:
        split = builder.call(aten.reshape.default, x, [4, 8, 2, 4])
        turned = builder.call(aten.permute.default, split, [0, 2, 1, 3])
        return builder.call(aten.reshape.default, turned, [4, 8, 8])
    if kind == 9:
        dim = draw(st.integers(1, 2))
        parts = builder.call(aten.chunk.default, x, 2, dim)
        halves = [builder.call(operator.getitem, parts, i) for i in (1, 0)]
        return builder.call(aten.cat.default, halves, dim)
    if kind == 10:
        return builder.call(aten.mul.Tensor, x, state["mask"])
    total = builder.call(aten.sum.dim_IntList, x, [draw(st.integers(0, 2))], True)
    return builder.call(aten.sub.Tensor, x, total)


def _drawn_seeds(draw: st.DrawFn, graph: fx.GraphModule, mesh: Mesh) -> dict[str, str]:
    """Annotations of a few values, each possible by itself."""
    names = [n for n in graph.graph.nodes if len(list_result_tensors(n)) == 1]
    seeds: dict[str, str] = {}
    for chosen in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        axis = draw(st.integers(0, len(mesh.axes) - 1))
        placement: Placement = draw(st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate()]))
        state = chosen.op != "call_function"
        shape: Any = list_result_tensors(chosen)[0].shape
        if explain_invalid_placement(placement, shape, mesh.shape[axis], state=state):
            continue
        key = {"placeholder": f"input:{chosen.name}", "get_attr": str(chosen.target)}
        seeds[key.get(chosen.op, f"node:{chosen.name}")] = f"{mesh.names[axis]}:{placement}"
    return seeds
