"""PipeMare's correction over an optimizer, and spike compensation as an optimizer."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from optimizers_stepped import bits, give_gradients, parameters, same_bits

from fxpart.compat.optimizer_parts import is_elementwise
from fxpart.errors import FxpartError
from fxpart.runtime.weight_prediction import PipeMareCorrection, SpikeCompensatedSGD


@settings(max_examples=25)
@given(staleness=st.integers(0, 7), decay=st.floats(0.01, 0.9), seed=st.integers(0, 9))
def test_correction_follows_its_formula(staleness: int, decay: float, seed: int) -> None:
    """delta by differences of weights that were kept; the same through a saved state."""
    weights = parameters(torch.float64, seed)
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    correction = PipeMareCorrection(optimizer, decay)
    loaded = PipeMareCorrection(optimizer, decay)
    delta = [torch.zeros_like(p) for p in weights]
    for update in range(4):
        gamma = decay ** (1 / max(1, staleness)) if update else decay  # nothing asked for before
        give_gradients(weights, update)
        old = [p.detach().clone() for p in weights]
        correction.before_update()
        optimizer.step()
        correction.after_update()
        delta = [
            gamma * d + (1 - gamma) * (p.detach() - o)
            for d, p, o in zip(delta, weights, old, strict=True)
        ]
        before = bits(optimizer)
        loaded.load_state_dict(correction.state_dict())
        for made, again, d, p in zip(
            correction.corrected(staleness),
            loaded.corrected(staleness),
            delta,
            weights,
            strict=True,
        ):
            assert torch.allclose(made, p.detach() - staleness * d, atol=1e-14, rtol=0)
            assert torch.equal(made, again)
            assert (made.data_ptr() == p.data_ptr()) == (staleness == 0)
        assert same_bits(before, bits(optimizer))
    assert correction.state_bytes() == sum(p.numel() * 8 for p in weights)


def test_correction_points_to_the_forwards_weights() -> None:
    """Weights that move evenly: W - staleness * delta is what they were so many updates ago."""
    weights = parameters(torch.float64)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    give_gradients(weights, 0)
    correction = PipeMareCorrection(optimizer, math.exp(-2), staleness=3)
    versions = []
    for _ in range(100):
        versions.append([p.detach().clone() for p in weights])
        correction.before_update()
        optimizer.step()
        correction.after_update()
    for made, then in zip(correction.corrected(3), versions[-3], strict=True):
        assert torch.allclose(made, then, atol=1e-10, rtol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_delay_it_is_sgd(momentum: float) -> None:
    """With the same bits."""
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1, "maximize": True}
    one, two = parameters(), parameters()
    compensated = SpikeCompensatedSGD(one, **options)
    plain = torch.optim.SGD(two, **options)
    for update in range(5):
        for weights, optimizer in ((one, compensated), (two, plain)):
            give_gradients(weights, update)
            optimizer.step()
    assert all(map(torch.equal, one, two))


@settings(max_examples=40)
@given(delay=st.integers(0, 9), momentum=st.floats(0, 0.95))
def test_a_gradient_contributes_as_much_in_the_end(delay: int, momentum: float) -> None:
    """A single gradient late by D leaves the weights where one in time would have by then."""
    moved = []
    for late in (0, delay):
        (weight, *_) = parameters(torch.float64)
        start = weight.detach().clone()
        optimizer = SpikeCompensatedSGD([weight], lr=0.1, momentum=momentum, delay=late)
        give_gradients([weight], 0)
        optimizer.step()
        for _ in range(delay - late + 4):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        moved.append(weight.detach() - start)
    assert torch.allclose(*moved, atol=1e-12, rtol=0)


def test_spike_compensation_as_an_optimizer() -> None:
    """Groups with delays, closures, missing gradients, what checks of optimizers ask, errors."""
    weights = parameters()
    groups = [{"params": weights[:1], "delay": 3}, {"params": weights[1:]}]
    optimizer = SpikeCompensatedSGD(groups, lr=0.1)
    give_gradients(weights, 0)
    weights[1].grad = None
    before = [p.detach().clone() for p in weights]
    assert optimizer.step(lambda: torch.tensor(2.0)) == 2
    assert torch.equal(weights[1], before[1])
    for place, factor in ((0, 0.729 + 2.71), (2, 1.0)):
        expected = before[place] - 0.1 * factor * weights[place].grad
        assert torch.allclose(weights[place].detach(), expected, atol=1e-6)
    assert is_elementwise(optimizer)
    for wrong in ({"momentum": 1.0}, {"delay": -1}, {"lr": -0.1}):
        with pytest.raises(FxpartError, match="out of range"):
            SpikeCompensatedSGD(weights, **wrong)
