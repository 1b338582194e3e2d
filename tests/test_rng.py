"""What dropout keeps: the same on every shard and device, at its rate, without patterns."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fxpart import rng
from fxpart.rng import KeyedDropout, call_kept, draw, draw_from, draw_kept, dropout_factors, mix
from fxpart.verification.single_process import keyed_random

ATEN = torch.ops.aten
seeds = st.integers(0, (1 << 63) - 1)
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4)


@given(seeds, shapes, st.floats(0, 1))
def test_cpu_and_other_devices_keep_the_same(seed: int, shape: list[int], rate: float) -> None:
    """The ops for other devices, run on a CPU."""
    like = torch.empty(shape)
    with pytest.MonkeyPatch.context() as patch:
        ours = draw_kept(seed, rate, like)
        device = partial(_on_device, rng._signed(seed, 64))
        patch.setattr(rng, "_keep_on_cpu", device)
        assert torch.equal(draw_kept(seed, rate, like), ours)
    assert ours.shape == like.shape


def _on_device(signed: int, seed: int, rows: Any, columns: Any, limit: int, device: Any) -> Any:
    return rng._keep(rows, columns, signed, limit, device)


@pytest.mark.slow
def test_one_kernel_keeps_the_same() -> None:
    """The seed is an argument: another one compiles nothing."""
    cpu = torch.device("cpu")
    kernel = rng._select_kernel("cpu")
    assert kernel is not rng._keep
    before = counters["stats"]["unique_graphs"]
    for seed, rows in ((3, 5), (-(1 << 62), 6), (7, 11)):
        for lines in ((rows, 9), (torch.arange(rows), torch.arange(9))):
            assert torch.equal(kernel(*lines, seed, 11, cpu), rng._keep(*lines, seed, 11, cpu))
    assert counters["stats"]["unique_graphs"] - before <= 2  # for numbers and for tensors


def test_a_device_without_a_compiler_runs_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is tried once."""
    tried: list[int] = []

    def broken(*_: Any) -> Any:
        tried.append(1)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    rng._select_kernel.cache_clear()
    given = torch.arange(4), 6, 0, torch.device("cpu")
    for seed in (5, 6):
        found = rng._keep_on_device(seed, *given)
        assert torch.equal(found, rng._keep_on_cpu(seed, *given))
    assert len(tried) == 1
    rng._select_kernel.cache_clear()


@given(seeds, st.data())
def test_a_shard_keeps_what_the_whole_keeps_there(seed: int, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    at = [
        data.draw(st.none() | st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
        for n in shape
    ]
    lines = [
        torch.arange(n) if p is None else torch.tensor(p) for n, p in zip(shape, at, strict=True)
    ]
    whole = draw_kept(seed, 0.5, torch.empty(shape))
    like = torch.empty([len(line) for line in lines])
    found = draw_kept(seed, 0.5, like, shape, [None if p is None else torch.tensor(p) for p in at])
    assert torch.equal(found, whole[torch.meshgrid(*lines, indexing="ij")])


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rates(rate: float) -> None:
    """Within five standard deviations; each column and row, too."""
    kept = draw_kept(mix(1, 2), rate, torch.empty(512, 512)).double()
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - rate) <= 5 * deviation / 512
    for dim in (0, 1):
        assert float((kept.mean(dim) - rate).abs().max()) <= 5 * deviation / math.sqrt(512)


@pytest.mark.parametrize("shape", [(1 << 18,), (512, 512), (1 << 18, 1), (64, 64, 64)])
def test_no_correlation(shape: tuple[int, ...]) -> None:
    """Of an element with those after it, with the same ones of other seeds, and of pairs."""
    kept = [
        draw_kept(seed, 0.5, torch.empty(shape)).flatten().double() * 2 - 1
        for seed in (0, 1, 2, 1 << 40, mix(0, 0), mix(0, 1))
    ]
    count = kept[0].numel()
    bound = 5 / math.sqrt(count)
    for lag in (1, 2, 3, 7, 64, 512, 4096):
        for one in kept:
            assert abs((one[lag:] * one[:-lag]).mean()) <= bound * 1.01
            triple = one[2 * lag :] * one[lag:-lag] * one[: -2 * lag]
            assert abs(triple.mean()) <= bound * 1.02
    for n, one in enumerate(kept):
        for other in kept[:n]:
            assert abs((one * other).mean()) <= bound
            for lag in (1, 64, 512):
                assert abs((one[lag:] * other[:-lag]).mean()) <= bound * 1.01


def test_bytes_are_uniform() -> None:
    """Chi-square of the bytes that eight neighbors form: 255 degrees of freedom."""
    kept = draw_kept(9, 0.5, torch.empty(1 << 15, 64)).reshape(-1, 8).long()
    counts = torch.bincount((kept << torch.arange(8)).sum(1), minlength=256).double()
    wanted = len(kept) / 256
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 255 + 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_factors(dtype: torch.dtype) -> None:
    """As ATen's dropout: one division in the dtype."""
    factors = dropout_factors(4, 0.3, torch.empty(100, dtype=dtype))
    one = torch.ones(1, dtype=dtype).div_(1 - 0.3)
    assert factors.dtype == dtype and set(factors.tolist()) == {0.0, one.item()}
    assert not dropout_factors(4, 1.0, torch.empty(100)).any()


class Layers(torch.nn.Module):
    """Every kind of dropout that torch has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functional = torch.nn.functional
        x = functional.dropout(x, 0.3) + functional.alpha_dropout(x, 0.3, training=True)
        x = functional.dropout1d(x, 0.3) + functional.feature_alpha_dropout(x, 0.3, training=True)
        x = x + functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return x + torch.bernoulli(x, 0.5) + x.detach().clone().bernoulli_(0.25)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_again_what_it_drew(reentrant: bool) -> None:
    """Its backward runs forward again, after random ops that follow it."""
    x = torch.ones(4, 64)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)) for _ in "abc"]

    def gradients(*, stored: bool) -> list[torch.Tensor]:
        y = x
        with keyed_random(5):
            for layer in layers:
                again = partial(checkpoint, layer, use_reentrant=reentrant)
                y = layer(y) if stored or layer is layers[0] else again(y)
            y.square().sum().backward()
        found = [layer[0].weight.grad for layer in layers]
        for layer in layers:
            layer.zero_grad()
        return found

    for found, wanted in zip(gradients(stored=False), gradients(stored=True), strict=True):
        assert torch.equal(found, wanted) and found.any()


def test_an_eager_module_draws_what_the_ops_draw() -> None:
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    with keyed_random(5):
        found = Layers()(x)
    ops = iter(range(7))

    def call(op: Any, *args: Any) -> torch.Tensor:
        made: torch.Tensor = draw(mix(5, next(ops)), op, *args)
        return made

    y = call(ATEN.dropout.default, x, 0.3, True) + call(ATEN.alpha_dropout.default, x, 0.3, True)
    y = call(ATEN.feature_dropout.default, y, 0.3, True) + call(
        ATEN.feature_alpha_dropout.default, y, 0.3, True
    )
    y = y + call(ATEN.scaled_dot_product_attention.default, y, y, y, None, 0.3)
    y = y + call(ATEN.bernoulli.p, y, 0.5) + call(ATEN.bernoulli.p, y, 0.25)
    torch.testing.assert_close(found, y, rtol=0, atol=0)


def test_two_dropouts_of_one_op_differ() -> None:
    ones = torch.ones(400)
    with KeyedDropout(3):
        first, second = torch.dropout(ones, 0.5, True), torch.dropout(ones, 0.5, True)
    assert torch.equal(first, draw(3, ATEN.dropout.default, ones, 0.5, True))
    assert 100 < int((first != second).sum()) < 300


@torch.library.custom_op("fxpart_tests::alpha_dropout", mutates_args=())
def alpha_dropout(x: torch.Tensor) -> torch.Tensor:
    """A kernel that draws: torch dispatches its composite ops whole."""
    with draw_from(3, ATEN.alpha_dropout.default, (x,), {}):
        made: torch.Tensor = ATEN.alpha_dropout.default(x, 0.5, True)
    return made


def test_the_kernel_of_a_custom_op_draws_the_same() -> None:
    x = torch.ones(50)
    assert torch.equal(alpha_dropout(x), draw(3, ATEN.alpha_dropout.default, x, 0.5, True))


def test_dropout_in_evaluation_keeps_all() -> None:
    found, _ = call_kept(1, ATEN.native_dropout.default, (torch.ones(9), 0.5, False), {})
    assert torch.equal(found, torch.ones(9))


def test_the_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    draw(3, ATEN.dropout.default, torch.ones(5), 0.5, True)
    draw(3, ATEN.rand.default, [4])
    assert torch.equal(torch.get_rng_state(), before)
