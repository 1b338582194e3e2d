"""The hand-written reference itself: its formulas against torch's and the notes' tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import asynchronous_models as models
import asynchronous_reference as reference
import hand_optimizers as hand
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

RATE = 0.05


def rate(update: int) -> float:
    """A rate that falls, so that a wrong update's shows."""
    return RATE / (1 + 0.1 * update)


OPTIMIZERS: dict[str, tuple[hand.Hand, Any]] = {
    "sgd": (hand.HandSgd(rate, 0.9), partial(torch.optim.SGD, lr=RATE, momentum=0.9)),
    "sgd with decay": (
        hand.HandSgd(rate, 0.8, 0.1),
        partial(torch.optim.SGD, lr=RATE, momentum=0.8, weight_decay=0.1),
    ),
    "adamw": (hand.HandAdamW(rate), partial(torch.optim.AdamW, lr=RATE)),
    "nadam": (hand.HandNAdam(rate), partial(torch.optim.NAdam, lr=RATE, betas=(0.99, 0.999))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_torch_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    by_hand, make = OPTIMIZERS[name]
    draw = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.randn(7, 5, generator=draw, dtype=dtype))
    weight = parameter.detach().clone()
    state: hand.State = {}
    optimizer = make([parameter])
    for update in range(20):
        gradient = torch.randn(7, 5, generator=draw, dtype=dtype)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate(update)
        optimizer.step()
        weight, state = by_hand.update(weight, gradient, state, rate(update))
        assert torch.equal(weight, parameter), update


def test_predictions_are_the_notes_numbers() -> None:
    one = torch.ones((), dtype=torch.float64)
    sgd = hand.HandSgd(lambda update: 0.1)
    adam = hand.HandAdamW(lambda update: 0.001, decay=0.0)
    state: hand.State = {"v": 0.5 * one}
    assert [sgd.predict(one, state, [0.1] * s, 5).item() for s in (1, 2, 3)] == pytest.approx(
        [0.95, 0.90, 0.85]
    )
    state = {"m": 0.02 * one, "v": 4e-4 * one, "step": 10.0}
    assert [adam.predict(one, state, [0.001] * s, 10).item() for s in (1, 3)] == pytest.approx(
        [0.99984681, 0.99954043], abs=1e-8
    )


def test_horizons_of_the_notes() -> None:
    for stages, forward, backward in (
        (4, [3, 2, 2, 1], [0, 0, 1, 1]),
        (8, [7, 6, 6, 5, 5, 4, 4, 3], [0, 0, 1, 1, 2, 2, 3, 3]),
    ):
        rows = [reference.reads("spectrain", k, stages, 1, 50) for k in range(stages)]
        assert [row.ahead for row in rows] == forward
        assert [row.back for row in rows] == backward
        assert forward == [k // 2 + stages - k - 1 for k in range(stages)]
        assert [reference.reads("lookahead", k, stages, 1, 1).ahead for k in range(stages)] == (
            forward
        )
    worked = [
        (reference.updates_in_forward(k, 4, 1, 10), reference.updates_in_backward(1, 10))
        for k in range(4)
    ]
    assert worked == [(6, 9), (7, 9), (8, 9), (9, 9)]


def test_kernels_have_their_formulas() -> None:
    draw = torch.Generator().manual_seed(5)
    g, x = (torch.randn(6, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    targets = torch.tensor([0, 3, 1, 2, 2, 0])
    y, logs = x.tanh(), x - x.exp().sum(1, keepdim=True).log()
    close = partial(torch.testing.assert_close, rtol=1e-14, atol=1e-15)
    close(models.tanh_slope(g, y), g * (1 - y * y))
    close(models.softmax_slope(g, logs), g - logs.exp() * g.sum(1, keepdim=True))
    close(models.mean_loss(logs, targets), -logs[torch.arange(6), targets].sum() / 6)


def test_movement_has_its_formula() -> None:
    draw = torch.Generator().manual_seed(6)
    old, new, past = (torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(3))
    before = hand.Version({"w": old}, moved={"w": past})
    found = reference.moved(before, hand.Version({"w": new}), 3)["w"]
    gamma = torch.e ** (-2 / 3)
    torch.testing.assert_close(found, gamma * past + (1 - gamma) * (new - old), rtol=1e-13, atol=0)


def built(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any, Any, Any]:
    """A module, its loss, its hand-written passes, and a batch."""
    torch.manual_seed(0)
    if name == "mlp":
        module = models.mlp().to(dtype)
        x, y = models.mlp_batches(1, 4)[0]
        passes: Any = models.HandMlp([n for n, _ in module.named_parameters()])
        return module, functional.cross_entropy, passes, (x.to(dtype), y)
    return models.Gpt(2).to(dtype), models.gpt_loss, models.HandGpt(2), models.gpt_batches(1, 4)[0]


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_one_set_of_weights_it_is_autograd(name: str, dtype: torch.dtype) -> None:
    module, loss, passes, (x, y) = built(name, dtype)
    weights = {n: p.detach() for n, p in module.named_parameters()}
    told = loss(module(x), y)
    (0.25 * told).backward()
    found, tape = passes.forward(weights, x, y)
    gradients = passes.backward(weights, tape, 0.25)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    if dtype == torch.float64:
        close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
    close(found, told.detach())
    for n, p in module.named_parameters():
        close(gradients[n], p.grad)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_with_two_sets_of_weights_each_op_goes_back_through_the_second(name: str) -> None:
    """An oracle of its own: forward with one set, each weight's place in backward by the other.

    d loss / d x of a chain is the product of the ops' Jacobians. Autograd gives it for a network
    whose every op is f(x; W_f) in value and f(x; W_b) in slope: f(x; W_b) + (f(x0; W_f) - f(x0;
    W_b)) with x0 cut off the graph. The slope in the weights is kept by letting them be read with
    x0 alone.
    """
    module, loss, passes, (x, y) = built(name, torch.float64)
    first = {n: p.detach() for n, p in module.named_parameters()}
    second = {n: w + 0.3 * torch.randn_like(w) for n, w in first.items()}
    leaves = {n: w.clone().requires_grad_() for n, w in first.items()}

    calling = [False]  # whether a layer is called from within its own hook

    def with_weights(layer: nn.Module, weights: Any, prefix: str, x: torch.Tensor) -> torch.Tensor:
        own = {n: weights[f"{prefix}.{n}"] for n, _ in layer.named_parameters()}
        calling[0] = True
        try:
            found = functional_call(layer, own, (x,))
        finally:
            calling[0] = False
        assert isinstance(found, torch.Tensor)
        return found

    def mixed(layer: nn.Module, args: Any, output: Any, prefix: str) -> Any:
        if calling[0]:
            return output
        slope = with_weights(layer, second, prefix, args[0])
        return with_weights(layer, leaves, prefix, args[0].detach()) + slope - slope.detach()

    for prefix, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.LayerNorm)):
            layer.register_forward_hook(partial(mixed, prefix=prefix))
    told = loss(functional_call(module, leaves, (x,)), y)
    (0.25 * told).backward()
    found, tape = passes.forward(first, x, y)
    gradients = passes.backward(second, tape, 0.25)
    torch.testing.assert_close(found, told.detach(), rtol=1e-12, atol=1e-13)
    for n, leaf in leaves.items():
        torch.testing.assert_close(gradients[n], leaf.grad, rtol=1e-10, atol=1e-12)


def test_flush_is_plain_training_bit_for_bit() -> None:
    module, loss, passes, _ = built("gpt", torch.float64)
    batches = models.gpt_batches(5, 4)
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    stage_of = {n: i % 3 for i, n in enumerate(weights)}
    run = reference.Reference(passes, stage_of, 3, 2, "flush", hand.HandAdamW(lambda _: RATE))
    losses, after = run.train(weights, batches)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    for (x, y), known in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        told = 0.5 * loss(module(x[:2]), y[:2]) + 0.5 * loss(module(x[2:]), y[2:])
        told.backward()
        optimizer.step()
        torch.testing.assert_close(told.detach(), known, rtol=1e-12, atol=1e-12)
    for n, p in module.named_parameters():
        torch.testing.assert_close(after[n], p.detach(), rtol=1e-9, atol=1e-10)
