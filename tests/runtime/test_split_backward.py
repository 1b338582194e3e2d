"""A backward in two halves gives the bits of one, runs nothing twice, and keeps less between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import live
from split_models import MODELS, Attention, Lookup, Scale, gradients, inputs, leaf, made
from torch import nn
from torch.nn import functional as F

from fxpart.runtime.executor.split_backward import BackwardSplitter


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("late", [False, True], ids=["W-at-once", "W-at-the-end"])
def test_bits_of_one_backward(name: str, late: bool) -> None:
    """Over three microbatches whose gradients add up."""
    whole, halved = made(name), made(name)
    halves, rests = BackwardSplitter(halved), []
    for microbatch in range(3):
        x, y = inputs(name, microbatch), inputs(name, microbatch)
        out = whole(x)
        torch.autograd.backward([out], [torch.cos(out.detach())])
        out = halved(y)
        rest = halves.first([out], [torch.cos(out.detach())], [y])
        assert gradients(halved, [y])[0] == gradients(whole, [x])[0]
        assert rest is not None
        rests.append(rest)
        if not late:
            rests.pop().run()
            assert gradients(halved, [y]) == gradients(whole, [x])
    for rest in rests:
        rest.run()
    seen = gradients(whole, [x])
    assert gradients(halved, [y]) == seen and any(g is not None for g in seen[1:])


def test_what_is_early_and_what_is_late() -> None:
    """Weights that two products use, norms and functions of the user's are early; others late."""
    for name, early in (
        ("attention", {f"{i}.{n}.{p}" for i in "01" for n in ("before", "between")
                       for p in ("weight", "bias")}),
        ("convolutions", {f"{i}.{n}.{p}" for i in "01" for n in ("norm", "last")
                          for p in ("weight", "bias")}),
        ("twice", {"w"}),
        ("own", {"w"}),
    ):  # fmt: skip
        module, x = made(name), inputs(name, 0)
        halves = BackwardSplitter(module)
        rest = halves.first([out := module(x)], [torch.ones_like(out)], [x])
        trainable = {n for n, p in module.named_parameters() if p.requires_grad}
        assert set(halves.early) == early
        assert {n for n, p in module.named_parameters() if p.grad is not None} == early
        assert rest is not None
        rest.run()
        assert {n for n, p in module.named_parameters() if p.grad is not None} == trainable


def test_a_first_stage_has_no_first_half() -> None:
    """Without an input to go back to, all is done in the second half; but not what is tied."""
    ids = torch.tensor([[1, 2, 2], [0, 5, 1]])
    torch.manual_seed(0)
    whole = Lookup()
    for tied in ([], ["table"]):
        module = copy.deepcopy(whole)
        halves = BackwardSplitter(module, [module.table.weight] if tied else [])
        out = module(ids)
        rest = halves.first([out], [torch.ones_like(out)], [])
        early = {n.split(".")[0] for n, p in module.named_parameters() if p.grad is not None}
        assert early == set(tied)
        assert rest is not None
        rest.run()
        expected = copy.deepcopy(whole)
        torch.autograd.backward(out := expected(ids), torch.ones_like(out))
        assert gradients(module, []) == gradients(expected, [])


def test_nothing_runs_twice() -> None:
    module, x = made("own"), inputs("own", 0)
    before = Scale.calls
    rest = BackwardSplitter(module).first([out := module(x)], [torch.ones_like(out)], [x])
    assert rest is not None
    rest.run()
    assert Scale.calls == before + 1


def test_ops_that_run_in_each_half() -> None:
    """Every product once in each half, once for each of its gradients; all else once in all."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, int] = {}

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(func)
            if not any(part in name for part in ("view", "detach", ".t.", "transpose", "empty")):
                self.found[name] = self.found.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    module, x = made("attention"), inputs("attention", 0)
    out = module(x)
    gradient = torch.ones_like(out)
    with Count() as whole:
        torch.autograd.backward([out], [gradient])
    module, x = made("attention"), inputs("attention", 0)
    out = module(x)
    with Count() as first:
        rest = BackwardSplitter(module).first([out], [gradient], [x])
    with Count() as second:
        assert rest is not None
        rest.run()
    both = {n: first.found.get(n, 0) + second.found.get(n, 0) for n in whole.found}
    products = "aten.mm.default"
    assert both == whole.found
    assert second.found[products] == whole.found[products] // 2 == 8
    assert set(second.found) == {products, "aten.sum.dim_IntList"}


def test_less_is_alive_after_the_first_half() -> None:
    """Attention scores, activations and norms are dropped: their memory is given back."""
    torch.manual_seed(0)
    module = nn.Sequential(Attention(32), Attention(32))
    halves = BackwardSplitter(module)
    held = []
    for _ in range(4):
        x = leaf(2, 256, 32)
        start = live()
        out = module(x)
        forward = live() - start
        gradient = torch.ones_like(out)
        rest = halves.first([out], [gradient], [x])
        del out, gradient
        held.append((forward, live() - start))
        assert rest is not None
        rest.run()
        del rest, x
    assert all(after < 0.75 * forward for forward, after in held[1:]), held


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Ops on a growing list of values: what, and of which two values (or a value and a weight)."""
    size = draw(st.integers(1, 12))
    ops = ("linear", "matmul", "add", "mul", "gelu", "norm", "bias", "scale", "relu_", "adapter")
    return [
        (draw(st.sampled_from(ops)), draw(st.integers(0, 7)), draw(st.integers(0, 7)))
        for _ in range(size)
    ]


class Random(nn.Module):
    """The graph that such a list describes; weights are few, so that some are used repeatedly."""

    def __init__(self, ops: list[tuple[str, int, int]], frozen: int) -> None:
        super().__init__()
        self.ops = ops
        made = [nn.Parameter(leaf(4, 4, seed=i)) for i in range(6)]
        self.weights = nn.ParameterList(made)
        self.vectors = nn.ParameterList([nn.Parameter(leaf(4, seed=i)) for i in range(3)])
        for i, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(frozen >> i & 1 == 0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y]
        for what, i, j in self.ops:
            a, b = values[i % len(values)], values[j % len(values)]
            w, v = self.weights[j % 6], self.vectors[j % 3]
            made = {
                "linear": lambda a=a, w=w, v=v: F.linear(a, w, v),
                "matmul": lambda a=a, b=b: a @ b,
                "add": lambda a=a, b=b: a + b,
                "mul": lambda a=a, b=b: a * b,
                "gelu": lambda a=a: F.gelu(a),
                "norm": lambda a=a, v=v: F.layer_norm(a, (4,), v),
                "bias": lambda a=a, v=v: a + v,
                "scale": lambda a=a, w=w: a * w,
                "relu_": lambda a=a: F.relu_(a * 1.5),
                "adapter": lambda a=a, w=w, j=j: a @ (w @ self.weights[(j + 1) % 6]),
            }[what]()
            values.append(torch.tanh(made))
        return values[-1], values[-1 - len(self.ops) // 2]


@pytest.mark.slow
@given(graphs(), st.integers(0, 511), st.sampled_from([(), (0,), (1,), (0, 1)]), st.integers(0, 63))
def test_random_graphs(
    ops: list[tuple[str, int, int]], frozen: int, wanted: tuple[int, ...], tied: int
) -> None:
    """Any graph, some weights frozen, some tied, gradients of some inputs wanted."""
    results = []
    for split in (False, True):
        module = Random(ops, frozen)
        mine = [p for i, p in enumerate(module.weights) if tied >> i & 1 and p.requires_grad]
        halves = BackwardSplitter(module, mine)
        for microbatch in range(2):
            given = [leaf(4, 4, seed=20 + microbatch + 5 * i).detach() for i in range(2)]
            leaves = [given[i].requires_grad_() for i in wanted]
            outs = [out for out in module(*given) if out.requires_grad]
            starts = [torch.sin(out.detach() + i) for i, out in enumerate(outs)]
            if not split:
                if outs:
                    torch.autograd.backward(outs, starts)
            else:
                rest = halves.first(outs, starts, leaves)
                if rest is not None:
                    rest.run()
        results.append(gradients(module, leaves))
    assert results[0] == results[1]
