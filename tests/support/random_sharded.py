"""Random graphs of ruled ops with random shardings, built as fx graphs without a capture.

Values have small, often odd sizes, so that cuts are uneven; parameters are used by several ops and
at different placements; results are now and then pinned to other placements than their op gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from fxpart.passes import all_passes
from fxpart.passes.rules import choices, layout, rule_of
from torch import fx

from fxpart.compat import fake_mode
from fxpart.compiler import (
    KEY,
    LEVEL_KEY,
    MESH_KEY,
    Level,
    NodeAnnotation,
    NodeSharding,
    PassManager,
)
from fxpart.compiler.graph_edit import annotate, annotation
from fxpart.compiler.tensor_sizes import tensors
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Shard

aten = torch.ops.aten
ROWS, CLASSES = 7, 6
SIZES = (2, 3, 4, 5, 6, 8)
AFTER = "key_random,mark_gradients,group_blocks"


class Maker:
    """Grows one random graph; ``inputs`` and ``state`` are its tensors."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.generator = torch.Generator().manual_seed(random.randrange(2**31))
        self.mode = fake_mode()
        self.graph = fx.Graph()
        self.inputs: list[torch.Tensor] = []
        self.state: dict[str, torch.Tensor] = {}
        self.held: dict[str, fx.Node] = {}
        self.values: list[fx.Node] = []

    def make(self, ops: int) -> fx.GraphModule:
        """Inputs, then ``ops`` random ops, then the sum of what is left as the loss."""
        for index in range(self.random.randint(1, 3)):
            self.values.append(self.input(f"x{index}", self.numbers(*self.shape())))
        self.ids = self.input("ids", torch.randint(0, ROWS, (4, 3), generator=self.generator))
        self.classes = self.input(
            "classes", torch.randint(0, CLASSES, (6,), generator=self.generator)
        )
        while len(self.values) < ops:
            kind = self.random.choice(KINDS)
            made = kind(self)
            if made is not None and made.meta["val"].numel() <= 2000:
                self.values.append(made)
        parts = [n for n in self.values if not n.users and n.op == "call_function"]
        total = self.call(aten.sum.default, self.call(aten.tanh.default, parts[-1]))
        for node in parts[:-1]:
            one = self.call(aten.sum.default, self.call(aten.tanh.default, node))
            total = self.call(aten.add.Tensor, total, one)
        self.graph.output((total, self.values[-1]))
        module = fx.GraphModule(dict(self.state), self.graph)  # type: ignore[arg-type]
        module.meta[LEVEL_KEY] = Level.CAPTURED
        return PassManager(all_passes()).run(AFTER, module)

    def shape(self) -> list[int]:
        return [self.random.choice(SIZES) for _ in range(self.random.randint(1, 3))]

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def input(self, name: str, data: torch.Tensor) -> fx.Node:
        """A new user input."""
        self.inputs.append(data)
        node = self.graph.placeholder(name)
        self._finish(node, self.mode.from_tensor(data))
        return node

    def weight(self, *shape: int) -> fx.Node:
        """A parameter: a known one of this shape, or a new one."""
        known = [n for n, t in self.state.items() if tuple(t.shape) == shape]
        if known and self.random.random() < 0.5:
            return self.held[self.random.choice(known)]
        name = f"w{len(self.state)}"
        trained = self.random.random() < 0.9
        self.state[name] = torch.nn.Parameter(self.numbers(*shape) * 0.5, requires_grad=trained)
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(name)
        self._finish(node, self.mode.from_tensor(self.state[name]))
        self.held[name] = node
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call with its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            held = target(*given[0], **given[1])
        self._finish(node, held)
        return node

    def _finish(self, node: fx.Node, held: Any) -> None:
        node.meta["val"] = held
        node.meta[KEY] = NodeAnnotation()

    def any(self, least: int = 0, most: int = 4) -> fx.Node | None:
        """An earlier value with so many dims, mostly a late one."""
        fit = [n for n in self.values if least <= n.meta["val"].dim() <= most]
        if not fit:
            return None
        return self.random.choice(fit[-4:] if self.random.random() < 0.7 else fit)

    def dims(self, node: fx.Node) -> list[int]:
        return list(node.meta["val"].shape)

    def item(self, node: fx.Node) -> fx.Node:
        """One tensor out of a tuple."""
        import operator

        index = self.random.randrange(len(node.meta["val"]))
        taken = self.graph.call_function(operator.getitem, (node, index))
        self._finish(taken, node.meta["val"][index])
        return taken


Kind = Callable[[Maker], "fx.Node | None"]
KINDS: list[Kind] = []


def kind(function: Kind) -> Kind:
    """Register a kind of op."""
    KINDS.append(function)
    return function


@kind
def linear(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    width, out = m.dims(x)[-1], m.random.choice(SIZES)
    bias = [m.weight(out)] if m.random.random() < 0.5 else []
    return m.call(aten.linear.default, x, m.weight(out, width), *bias)


@kind
def turned_weight(m: Maker) -> fx.Node | None:
    if (x := m.any(2)) is None:
        return None
    weight = m.weight(m.random.choice(SIZES), m.dims(x)[-1])
    return m.call(aten.matmul.default, x, m.call(aten.t.default, weight))


@kind
def scaled_weight(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    weight = m.call(aten.tanh.default, m.weight(m.random.choice(SIZES), m.dims(x)[-1]))
    return m.call(aten.linear.default, x, weight)


@kind
def addmm(m: Maker) -> fx.Node | None:
    if (x := m.any(2, 2)) is None:
        return None
    out = m.random.choice(SIZES)
    return m.call(aten.addmm.default, m.weight(out), x, m.weight(m.dims(x)[-1], out))


@kind
def products(m: Maker) -> fx.Node | None:
    if (x := m.any(2)) is None:
        return None
    y = m.call(aten.transpose.int, x, -1, -2)
    other = m.any(2)
    if other is not None and m.dims(other) == m.dims(x):
        return m.call(aten.matmul.default, other, y)
    return m.call(aten.matmul.default, x, y)


@kind
def pointwise(m: Maker) -> fx.Node | None:
    x = m.any()
    op = m.random.choice(
        [aten.relu.default, aten.tanh.default, aten.neg.default, aten.gelu.default]
    )
    return m.call(op, x) if x is not None else None


@kind
def binary(m: Maker) -> fx.Node | None:
    x, y = m.any(), m.any()
    if x is None or y is None:
        return None
    try:
        torch.broadcast_shapes(m.dims(x), m.dims(y))
    except RuntimeError:
        y = x
    op = m.random.choice([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor])
    return m.call(op, x, y)


@kind
def with_vector(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    return m.call(m.random.choice([aten.add.Tensor, aten.mul.Tensor]), x, m.weight(m.dims(x)[-1]))


@kind
def norm(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    width = m.dims(x)[-1]
    return m.call(aten.layer_norm.default, x, [width], m.weight(width), m.weight(width))


@kind
def softmax(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    return m.call(aten.softmax.int, x, m.random.randrange(-1, len(m.dims(x)) - 1))


@kind
def reduction(m: Maker) -> fx.Node | None:
    if (x := m.any(2)) is None:
        return None
    dim = m.random.randrange(len(m.dims(x)))
    op = m.random.choice([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default])
    return m.call(op, x, [dim], m.random.random() < 0.5)


@kind
def flat(m: Maker) -> fx.Node | None:
    if (x := m.any(2)) is None:
        return None
    shape = m.dims(x)
    at = m.random.randrange(len(shape) - 1)
    return m.call(
        aten.reshape.default, x, [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    )


@kind
def split_dim(m: Maker) -> fx.Node | None:
    if (x := m.any(1, 3)) is None:
        return None
    shape = m.dims(x)
    at = m.random.randrange(len(shape))
    parts = [p for p in (2, 3, 4) if shape[at] % p == 0]
    if not parts:
        return None
    part = m.random.choice(parts)
    return m.call(aten.reshape.default, x, [*shape[:at], part, shape[at] // part, *shape[at + 1 :]])


@kind
def permuted(m: Maker) -> fx.Node | None:
    if (x := m.any(2)) is None:
        return None
    order = list(range(len(m.dims(x))))
    m.random.shuffle(order)
    return m.call(aten.permute.default, x, order)


@kind
def expanded(m: Maker) -> fx.Node | None:
    if (x := m.any(1, 3)) is None:
        return None
    one = m.call(aten.unsqueeze.default, x, 0)
    return m.call(aten.expand.default, one, [m.random.choice(SIZES), *m.dims(x)])


@kind
def joined(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    y = m.call(aten.tanh.default, x)
    return m.call(aten.cat.default, [x, y], m.random.randrange(len(m.dims(x))))


@kind
def pieces(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    dim = m.random.randrange(len(m.dims(x)))
    size = m.dims(x)[dim]
    if size % 2:
        return m.call(aten.slice.Tensor, x, dim, 1, size)
    return m.item(m.call(aten.split.Tensor, x, size // 2, dim))


@kind
def selected(m: Maker) -> fx.Node | None:
    if (x := m.any(2)) is None:
        return None
    dim = m.random.randrange(len(m.dims(x)))
    return m.call(aten.select.int, x, dim, m.dims(x)[dim] - 1)


@kind
def embedded(m: Maker) -> fx.Node | None:
    return m.call(aten.embedding.default, m.weight(ROWS, m.random.choice(SIZES)), m.ids)


@kind
def losses(m: Maker) -> fx.Node | None:
    if (x := m.any(1)) is None:
        return None
    rows = m.call(aten.linear.default, x, m.weight(CLASSES, m.dims(x)[-1]))
    flat = m.call(aten.reshape.default, rows, [-1, CLASSES])
    count = m.dims(flat)[0]
    if count < 6:
        return None
    first = m.call(aten.slice.Tensor, flat, 0, 0, 6)
    return m.call(aten.cross_entropy_loss.default, first, m.classes)


@kind
def dropped(m: Maker) -> fx.Node | None:
    x = m.any()
    if x is None:
        return None
    if m.random.random() < 0.3:
        x = m.call(aten.permute.default, x, list(reversed(range(len(m.dims(x))))))
    return m.call(aten.dropout.default, x, 0.25, True)


@kind
def attended(m: Maker) -> fx.Node | None:
    if (x := m.any(3, 4)) is None:
        return None
    heads = m.call(aten.unsqueeze.default, x, 1) if len(m.dims(x)) == 3 else x
    return m.call(aten.scaled_dot_product_attention.default, heads, heads, heads)


def shard_at_random(graph: fx.GraphModule, mesh: Mesh, random: Random) -> None:
    """Give every node a sharding: inputs and state any placement, ops any strategy that exists."""
    graph.meta[MESH_KEY] = mesh
    plain = ("",) * len(mesh.axes)
    states: dict[str, tuple[Placement, ...]] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr") and isinstance(node.meta["val"], torch.Tensor):
            held = states.setdefault(str(node.target), _anywhere(node.meta["val"], mesh, random))
            annotate(node, sharding=NodeSharding(plain, (held,)))
        elif node.op == "call_function" and (rule := rule_of(node)) is not None:
            known = choices(rule)
            for _ in range(5):
                strategy = tuple(
                    "" if random.random() < 0.3 else random.choice(known) for _ in mesh.axes
                )
                made = layout(rule, strategy, mesh)
                if made is not None:
                    annotate(node, sharding=NodeSharding(strategy, made.results))
                    break
            if random.random() < 0.15:
                _pin(node, mesh, random)


def _anywhere(tensor: torch.Tensor, mesh: Mesh, random: Random) -> tuple[Placement, ...]:
    """Placements of a tensor: cut where there is enough of a dim, or replicated."""
    left = list(tensor.shape)
    found: list[Placement] = []
    for parts in mesh.shape:
        dims = [d for d, size in enumerate(left) if size >= parts]
        if dims and random.random() < 0.5:
            dim = random.choice(dims)
            left[dim] = -(-left[dim] // parts)
            found.append(Shard(dim))
        else:
            found.append(REPLICATE)
    return tuple(found)


def _pin(node: fx.Node, mesh: Mesh, random: Random) -> None:
    """Another placement for the op's results than it gives."""
    known = annotation(node).sharding
    if known is None or PARTIAL in known.results:
        return
    held = tuple(_anywhere(t, mesh, random) for t in tensors(node.meta["val"]))
    annotate(node, sharding=replace(known, results=held))
