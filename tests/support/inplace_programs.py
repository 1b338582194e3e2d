"""Random graphs with views and in-place ops, built as torch.export would leave them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from fxpart.compat import fake_mode
from fxpart.compiler import KEY, LEVEL_KEY, Level, NodeAnnotation

aten = torch.ops.aten


class Builder:
    """Builds one graph at level CAPTURED; values carry fake tensors."""

    def __init__(self, *, symbolic: bool = False, **state: torch.Tensor) -> None:
        self.mode = fake_mode(symbolic=symbolic)
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.state = state
        for name, tensor in state.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.root.register_parameter(name, tensor)
            else:
                self.root.register_buffer(name, tensor)

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A placeholder."""
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        node.meta[KEY] = NodeAnnotation()
        return node

    def get(self, name: str) -> fx.Node:
        """State by name."""
        node = self.graph.get_attr(name)
        held = self.state[name]
        with self.mode:
            node.meta["val"] = torch.empty(held.shape, dtype=held.dtype)
        node.meta[KEY] = NodeAnnotation()
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """One op, its value from a run on fake tensors."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        node.meta[KEY] = NodeAnnotation(source=f"test.py:{len(self.graph.nodes)}")
        return node

    def finish(self, *outputs: fx.Node) -> fx.GraphModule:
        """The module; the first output is the sum of the squares of all."""
        loss = None
        for value in outputs:
            part = self.call(aten.sum.default, self.call(aten.mul.Tensor, value, value))
            loss = part if loss is None else self.call(aten.add.Tensor, loss, part)
        self.graph.output((loss, *outputs))
        module = fx.GraphModule(self.root, self.graph)
        module.meta[LEVEL_KEY] = Level.CAPTURED
        return module


def run(module: fx.GraphModule, *inputs: Any) -> tuple[list[Any], list[Any], list[torch.Tensor]]:
    """Outputs, gradients of all parameters, and buffers after one forward and backward."""
    results = fx.Interpreter(module, garbage_collect_values=False).run(*inputs)
    parameters = dict(sorted(module.named_parameters()))
    grads: list[Any] = [None] * len(parameters)
    if results[0].requires_grad:
        grads = list(torch.autograd.grad(results[0], list(parameters.values()), allow_unused=True))
    buffers = [b.detach().clone() for _, b in sorted(module.named_buffers())]
    return [r.detach().clone() for r in results], grads, buffers


def same_bits(a: list[Any], b: list[Any]) -> bool:
    """Equal tensors, None against None; nan equals nan."""
    return len(a) == len(b) and all(
        (x is None and y is None)
        or (
            x is not None
            and y is not None
            and x.dtype == y.dtype
            and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
            and torch.equal(torch.isnan(x), torch.isnan(y))
        )
        for x, y in zip(a, b, strict=True)
    )


def _view(draw: st.DrawFn, builder: Builder, x: fx.Node) -> fx.Node:
    """A view of a random kind that suits the shape."""
    shape = tuple(x.meta["val"].shape)
    kinds = ["alias", "detach", "unsqueeze", "to"]
    if shape:
        kinds += ["slice", "select", "split", "chunk", "unbind", "narrow", "transpose", "permute"]
        kinds += ["reshape", "flatten", "squeeze", "expand"]
    if len(shape) >= 2:
        kinds += ["diagonal", "t"] if len(shape) == 2 else ["diagonal"]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    size = shape[dim] if shape else 1
    call = builder.call
    if kind == "slice":
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 2))
        return call(aten.slice.Tensor, x, dim, start, size, step)
    if kind == "select":
        return call(aten.select.int, x, dim, draw(st.integers(-size, size - 1)))
    if kind == "narrow":
        start = draw(st.integers(0, size - 1))
        return call(aten.narrow.default, x, dim, start, size - start)
    if kind in ("split", "chunk", "unbind"):
        args = {"split": (x, 1, dim), "chunk": (x, 2, dim), "unbind": (x, dim)}[kind]
        op = {"split": aten.split.Tensor, "chunk": aten.chunk.default, "unbind": aten.unbind.int}
        pieces = call(op[kind], *args)
        count = len(pieces.meta["val"])
        return call(operator.getitem, pieces, draw(st.integers(0, count - 1)))
    if kind == "transpose":
        return call(aten.transpose.int, x, dim, draw(st.integers(0, len(shape) - 1)))
    if kind == "permute":
        return call(aten.permute.default, x, draw(st.permutations(range(len(shape)))))
    if kind == "reshape":
        return call(aten.reshape.default, x, [*shape[:-1], 1, shape[-1]])
    if kind == "flatten":
        return call(aten.flatten.using_ints, x)
    if kind == "squeeze":
        return call(aten.squeeze.default, x)
    if kind == "expand":
        return call(aten.expand.default, x, list(shape))
    if kind == "diagonal":
        return call(aten.diagonal.default, x)
    if kind == "t":
        return call(aten.t.default, x)
    if kind == "unsqueeze":
        return call(aten.unsqueeze.default, x, draw(st.integers(0, len(shape))))
    if kind == "to":
        return call(aten.to.dtype, x, torch.float32)
    return call(aten.detach.default if kind == "detach" else aten.alias.default, x)


def _write(draw: st.DrawFn, builder: Builder, x: fx.Node, y: fx.Node) -> fx.Node:
    """An in-place op on x, with y where the shapes allow it."""
    shape, other = tuple(x.meta["val"].shape), tuple(y.meta["val"].shape)
    scalar = draw(st.sampled_from([0.5, -2.0, 3.0]))
    choices: list[tuple[Any, ...]] = [
        (aten.mul_.Scalar, scalar),
        (aten.add_.Scalar, scalar),
        (aten.relu_.default,),
        (aten.fill_.Scalar, scalar),
        (aten.zero_.default,),
        (aten.clamp_.default, -1.0, 1.0),
        (aten.tanh_.default,),
    ]
    if torch.broadcast_shapes(shape, other) == shape if _fit(shape, other) else False:
        choices += [(aten.mul_.Tensor, y), (aten.add_.Tensor, y), (aten.copy_.default, y)] * 2
        mask = builder.call(aten.gt.Scalar, y, 0)
        choices += [(aten.masked_fill_.Scalar, mask, scalar)]
    op, *args = draw(st.sampled_from(choices))
    return builder.call(op, x, *args)


def _fit(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes broadcast."""
    return all(m == n or m == 1 or n == 1 for m, n in zip(a[::-1], b[::-1], strict=False))


@st.composite
def programs(draw: st.DrawFn) -> fx.GraphModule:
    """A graph of 3 to 14 steps over a parameter, an input and a buffer."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    parameter = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    builder = Builder(weight=parameter, count=torch.zeros(()))
    x = builder.input(3, 4)
    weight, count = builder.get("weight"), builder.get("count")
    values = [builder.call(aten.mul.Tensor, x, weight), builder.call(aten.clone.default, x)]
    for _ in range(draw(st.integers(3, 14))):
        source = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["view", "view", "write", "write", "pure", "pair", "state"]))
        if kind == "view":
            values.append(_view(draw, builder, source))
        elif kind == "write":
            values.append(_write(draw, builder, source, draw(st.sampled_from(values))))
        elif kind == "pure":
            op = draw(st.sampled_from([aten.sin.default, aten.relu.default, aten.clone.default]))
            values.append(builder.call(op, source))
        elif kind == "pair":
            other = draw(st.sampled_from(values))
            if _fit(tuple(source.meta["val"].shape), tuple(other.meta["val"].shape)):
                values.append(builder.call(aten.add.Tensor, source, other))
        else:
            builder.call(aten.add_.Scalar, count, 1)
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True))
    return builder.finish(*outputs)
