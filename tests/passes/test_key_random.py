"""key_random: what counts as random, and that keyed numbers depend on nothing but the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from inplace_programs import Builder, run, same_bits
from torch import fx, nn

from fxpart.capture import capture
from fxpart.compiler import KEY, PassManager
from fxpart.compiler.effects import is_random
from fxpart.errors import FxpartError
from fxpart.rng import dropout_factors, mix, seeded

aten = torch.ops.aten


def keyed(module: fx.GraphModule) -> fx.GraphModule:
    return PassManager(all_passes()).run("key_random", module)


@pytest.mark.parametrize(
    ("op", "args", "random"),
    [
        (aten.dropout.default, (0.5, True), True),
        (aten.dropout.default, (0.5, False), False),
        (aten.dropout.default, (0.0, True), False),
        (aten.feature_dropout.default, (0.5, True), True),
        (aten.alpha_dropout.default, (0.5, True), True),
        (aten.feature_alpha_dropout.default, (0.5, False), False),
        (aten.native_dropout.default, (0.5, True), True),
        (aten.rrelu.default, (0.1, 0.3, True), True),
        (aten.rrelu.default, (0.1, 0.3, False), False),
        (aten.rrelu.default, (), False),
        (aten.bernoulli.default, (), True),
        (aten.bernoulli.p, (0.5,), True),
        (aten.rand_like.default, (), True),
        (aten.multinomial.default, (2,), True),
        (aten.uniform.default, (), True),
        (aten.relu.default, (), False),
    ],
)
def test_what_is_random(op: Any, args: tuple[Any, ...], random: bool) -> None:
    builder = Builder()
    x = builder.input(4, 6, 5) if "feature" in str(op) else builder.input(4, 6)
    y = builder.call(op, builder.call(aten.sigmoid.default, x), *args)
    assert is_random(y) == random


def test_attention_and_recurrent_dropout() -> None:
    builder = Builder()
    q = builder.input(1, 2, 4, 8)
    attention = aten.scaled_dot_product_attention.default
    assert not is_random(builder.call(attention, q, q, q))
    assert is_random(builder.call(attention, q, q, q, None, 0.25))
    x, h = builder.input(3, 2, 4), builder.input(2, 2, 4)
    w = [builder.input(16, 4), builder.input(16, 4)] * 2
    for dropout, train, expected in ((0.5, True, True), (0.0, True, False), (0.5, False, False)):
        call = (x, [h, h], w, False, 2, dropout, train, False, False)
        assert is_random(builder.call(aten.lstm.input, *call)) == expected


def noisy() -> fx.GraphModule:
    """Three random ops with a parameter between them."""
    builder = Builder(weight=nn.Parameter(torch.full((4, 6), 0.5)))
    x = builder.input(4, 6)
    y = builder.call(aten.dropout.default, x, 0.5, True)
    y = builder.call(aten.mul.Tensor, y, builder.get("weight"))
    y = builder.call(aten.add.Tensor, y, builder.call(aten.rand.default, [4, 6]))
    coin = builder.call(aten.bernoulli.p, builder.call(aten.detach.default, y), 0.5)
    return builder.finish(coin, y)


def test_calls_and_indices() -> None:
    graph = keyed(noisy()).graph
    first = next(iter(graph.nodes))
    assert (first.op, first.name, first.meta["val"]) == ("placeholder", "rng_key", 0)
    calls = [n for n in graph.nodes if n.target is seeded]
    assert [n.args[:3] for n in calls] == [
        (first, 0, aten.dropout.default),
        (first, 1, aten.rand.default),
        (first, 2, aten.bernoulli.p),
    ]
    assert [n.meta[KEY].random for n in calls] == [0, 1, 2]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**62), st.integers(0, 2**31), st.integers(0, 2**31))
def test_numbers_depend_on_the_key_alone(key: int, before: int, after: int) -> None:
    module = keyed(noisy())
    x = torch.ones(4, 6)
    torch.manual_seed(before)
    first = run(module, key, x)
    drawn = torch.rand(3)
    torch.manual_seed(after)
    second = run(module, key, x)
    for a, b in zip(first, second, strict=True):
        assert same_bits(a, b)
    # and the global generator is left as it was: the next draw is the first after its seed
    torch.manual_seed(before)
    assert torch.equal(drawn, torch.rand(3))


def test_order_of_evaluation_does_not_matter() -> None:
    module = keyed(noisy())
    x = torch.ones(4, 6)
    expected = run(module, 11, x)
    graph = module.graph
    noise = next(n for n in graph.nodes if n.target is seeded and n.args[2] is aten.rand.default)
    graph.find_nodes(op="placeholder")[-1].append(noise)
    graph.lint()
    module.recompile()
    for a, b in zip(expected, run(module, 11, x), strict=True):
        assert same_bits(a, b)


def test_numbers_are_those_of_the_op_under_the_seed() -> None:
    builder = Builder()
    module = keyed(builder.finish(builder.call(aten.rand_like.default, builder.input(50))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(5, 0))
        expected = torch.rand(50)
    assert torch.equal(module(5, torch.ones(50))[1], expected)


def test_dropout_is_a_function_of_the_seed_and_of_positions() -> None:
    builder = Builder()
    module = keyed(builder.finish(builder.call(aten.dropout.default, builder.input(50), 0.5, True)))
    expected = dropout_factors(mix(5, 0), 0.5, torch.ones(50))
    assert torch.equal(module(5, torch.ones(50))[1], expected)


def test_a_parameter_of_the_key_s_name_gives_way() -> None:
    builder = Builder(rng_key=nn.Parameter(torch.ones(4)))
    x = builder.input(4)
    module = keyed(builder.finish(builder.call(aten.mul.Tensor, x, builder.get("rng_key"))))
    assert next(iter(module.graph.nodes)).name == "rng_key"
    assert torch.equal(module(0, torch.full((4,), 2.0))[1], torch.full((4,), 2.0))


def test_an_input_of_the_key_s_name_is_refused() -> None:
    builder = Builder()
    node = builder.graph.placeholder("rng_key")
    with builder.mode:
        node.meta["val"] = torch.empty(4)
    with pytest.raises(FxpartError, match="rng_key"):
        keyed(builder.finish(builder.call(aten.relu.default, node)))


@pytest.mark.slow
def test_in_place_and_module_dropouts_of_a_captured_model() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Dropout(0.5, inplace=True), nn.RReLU(inplace=True), nn.AlphaDropout(0.2)
    )
    captured = capture(model, (torch.randn(4, 8),))
    graph = PassManager(all_passes()).run(PREPARE, captured.graph).graph
    names = [str(n.args[2]) for n in graph.nodes if n.target is seeded]
    assert names == ["aten.dropout.default", "aten.rrelu.default", "aten.alpha_dropout.default"]
