"""Layers that are repeated instead of traced: the graph is that of the model traced in full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from repeated_layers import LAYERS, REPEATED, Layer, Stack, X, capture_with, repeated, text
from torch import nn
from zoo import ZOO

from fxpart.capture import CapturedModel, capture, request
from fxpart.capture.layer_replay import REAL, LayerReplay
from fxpart.capture.module_signature import (
    LayerIndexAccessError,
    Untouchable,
    counters,
    structure,
)
from fxpart.compiler import KEY


@pytest.mark.slow
def test_equal_layers_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    assert repeated(monkeypatch, model) == REPEATED
    captured, _ = capture_with(monkeypatch, model)
    modules = {n.meta[KEY].module for n in captured.graph.graph.nodes}
    assert {f"layers.{i}.lin" for i in range(LAYERS)} <= modules
    assert captured.symbolic
    assert torch.equal(captured.graph(X)[1], model(X))


@pytest.mark.slow
def test_layers_on_meta_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Stack()
    assert repeated(monkeypatch, model) == REPEATED


class Odd(Layer):
    """Every second layer does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.index % 2 else x * 2


class Scaled(Layer):
    """The number becomes part of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / (self.index + 1)


class Asks(Layer):
    """Asks for the number's type, and swallows what goes wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x) if isinstance(self.index, int) else x
        except Exception:
            return x


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Odd, Scaled, Asks])
def test_a_layer_that_looks_at_its_number(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]
) -> None:
    model = Stack(layer)
    plain, _ = capture_with(monkeypatch, model, full=True)
    quick, made = capture_with(monkeypatch, model)
    assert text(quick) == text(plain)
    assert made[0].touched and made[0].repeated == 0
    assert [layer.index for layer in model.layers] == list(range(LAYERS))


class Remembers(Layer):
    """Keeps a value of its last call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape[-1] if not hasattr(self, "seen") else self.seen + 1
        return super().forward(x)


class Constant(Layer):
    """Has a constant in its forward, which the graph holds as a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Counts(Layer):
    """Writes a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(4)  # type: ignore[assignment]


class Rate(Layer):
    """Differs by a number that is no counter."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rate = 1.0 / (index + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.rate


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Remembers, Constant, Counts, Rate])
def test_layers_that_are_always_traced(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]
) -> None:
    assert repeated(monkeypatch, Stack(layer)) == 0


@pytest.mark.slow
def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, result: result * 2)
    assert repeated(monkeypatch, model) == 0


def test_counters_and_structure() -> None:
    a, b = Layer(0), Layer(1)
    assert counters([a, b]) == {("", "index")}
    assert structure(a) != structure(b)
    assert structure(a, counters([a, b])) == structure(b, counters([a, b]))
    b.norm.eps = 1e-3
    assert structure(a, counters([a, b])) != structure(b, counters([a, b]))


def test_untouchable_refuses_everything() -> None:
    number: Any = Untouchable()
    uses: list[Callable[[], Any]] = [
        lambda: number + 1, lambda: 1 + number, lambda: number == 3, lambda: number < 3,
        lambda: [1, 2][number], lambda: isinstance(number, int), lambda: bool(number),
        lambda: hash(number), lambda: f"{number}", lambda: str(number), lambda: int(number),
        lambda: range(number), lambda: number % 2, lambda: number in (1, 2),
        lambda: [1] * number, lambda: number.bit_length(), lambda: -number,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(LayerIndexAccessError):
            use()
    assert number is not None


@pytest.mark.slow
def test_rows_and_lengths_free_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer reads its sizes from another op than the last; that is no difference."""
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=2, n_positions=32, attn_pdrop=0.0)
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config).bfloat16().train()
        ids = torch.zeros(4, 32, dtype=torch.int64)
    made: list[LayerReplay] = []

    def take(least: int) -> CapturedModel:
        def make(root: nn.Module) -> LayerReplay:
            made.append(LayerReplay(root, least=least))
            return made[-1]

        monkeypatch.setattr(request, "LayerReplay", make)
        return capture(model, None, {"input_ids": ids, "labels": ids}, batch_size=4)

    plain, quick = take(10**6), take(LAYERS)
    assert made[-1].repeated == LAYERS - REAL - 1
    assert text(quick) == text(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_with_as_much_repeated_as_can_be(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    built = entry.build()
    take = partial(
        capture, built.model, built.batch, loss=built.loss, batch_size=built.batch_size,
        batch_dims=built.batch_dims,
    )  # fmt: skip
    monkeypatch.setattr(request, "LayerReplay", partial(LayerReplay, least=10**6))
    plain = take()
    monkeypatch.setattr(request, "LayerReplay", partial(LayerReplay, real=1, least=2))
    quick = take()
    assert text(quick) == text(plain)
