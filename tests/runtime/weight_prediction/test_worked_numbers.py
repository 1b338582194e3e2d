"""The worked numbers of the notes on weight versions, section 2, to all their digits."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from fxpart.runtime.weight_prediction import (
    RULES,
    PipeMareCorrection,
    SpikeCompensatedSGD,
    discounted_lr,
    make_predictor,
)
from fxpart.schedule import weight_modes

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.001, betas=(0.9, 0.999))
ADAMW = partial(torch.optim.AdamW, lr=0.001, betas=(0.9, 0.999), weight_decay=0.0)


def one(start: float = 1.0) -> nn.Parameter:
    """A single weight in double precision."""
    return nn.Parameter(torch.tensor([start], dtype=torch.float64))


def looked(make: partial[torch.optim.Optimizer], rule: str, updates: int, **state: float) -> float:
    """A weight of 1 with that optimizer state, so many updates ahead."""
    weight = one()
    optimizer = make([weight])
    optimizer.state[weight] = {
        name: torch.tensor(number if name == "step" else [number], dtype=torch.float64)
        for name, number in state.items()
    }
    return make_predictor(rule, optimizer).predict(updates)[0].item()


def test_the_table_is_the_schedules() -> None:
    assert tuple(RULES) == weight_modes.RULES


@pytest.mark.parametrize(("updates", "expected"), [(1, 0.95), (2, 0.90), (3, 0.85)])
def test_linear_momentum(updates: int, expected: float) -> None:
    found = looked(SGD, "linear", updates, momentum_buffer=0.5)
    assert found == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("make", [ADAM, ADAMW])
def test_linear_adam(make: partial[torch.optim.Optimizer]) -> None:
    state = {"step": 10, "exp_avg": 0.02, "exp_avg_sq": 4e-4}
    found = [looked(make, "linear", s, **state) for s in (1, 3)]
    assert round((1 - found[0]) / 0.001, 7) == 0.1531891
    assert [round(one, 8) for one in found] == [0.99984681, 0.99954043]


@pytest.mark.parametrize("rule", ["decaying", "shadow"])
@pytest.mark.parametrize(("updates", "expected"), [(1, 0.955), (2, 0.9145), (3, 0.87805)])
def test_decaying_momentum(rule: str, updates: int, expected: float) -> None:
    found = looked(SGD, rule, updates, momentum_buffer=0.5)
    assert found == pytest.approx(expected, abs=1e-15)
    closed = 1 - 0.1 * 0.5 * (0.9 - 0.9 ** (updates + 1)) / (1 - 0.9)
    assert found == pytest.approx(closed, abs=1e-15)


def test_decaying_is_bounded() -> None:
    far = looked(SGD, "decaying", 5000, momentum_buffer=0.5)
    assert far == pytest.approx(1 - 0.1 * 0.5 * 0.9 / 0.1, abs=1e-12)


@pytest.mark.parametrize("make", [ADAM, ADAMW])
@pytest.mark.parametrize("rule", ["decaying", "shadow"])
def test_decaying_adam(make: partial[torch.optim.Optimizer], rule: str) -> None:
    """v decays with m, as in the optimizer's own step; the notes' figures hold v at 4e-4.

    amsgrad, whose largest v stays, is the optimizer that does so.
    """
    state = {"step": 10, "exp_avg": 0.02, "exp_avg_sq": 4e-4}
    found = [round(looked(make, rule, s, **state), 8) for s in (1, 2, 3)]
    assert (
        found == [0.99986271, 0.99973927, 0.99962799] == [round(by_hand(s), 8) for s in (1, 2, 3)]
    )
    state["max_exp_avg_sq"] = 4e-4
    held = partial(make, amsgrad=True)
    found = [round(looked(held, rule, s, **state), 8) for s in (1, 2, 3)]
    assert found == [0.99986278, 0.99973947, 0.99962835]


def by_hand(updates: int) -> float:
    """Rule 3 for Adam by its formula, m b1^j and v b2^j."""
    weight = 1.0
    for j in range(1, updates + 1):
        first = 0.02 * 0.9**j / (1 - 0.9 ** (10 + j))
        second = 4e-4 * 0.999**j / (1 - 0.999 ** (10 + j))
        weight -= 0.001 * first / (math.sqrt(second) + 1e-8)
    return weight


def test_weight_difference() -> None:
    weight = one(1.05)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    look = make_predictor("difference", optimizer)
    weight.grad = torch.tensor([0.05], dtype=torch.float64)
    look.before_update()
    optimizer.step()
    look.after_update()
    assert weight.item() == pytest.approx(1, abs=1e-15)
    assert look.predict(3)[0].item() == pytest.approx(0.85, abs=1e-15)


def test_spike_compensation() -> None:
    weight = one()
    optimizer = SpikeCompensatedSGD([weight], lr=0.1, momentum=0.9, delay=3)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([0.5], dtype=torch.float64)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.item() == pytest.approx(0.623295, abs=1e-15)
    assert optimizer.state[weight]["momentum_buffer"].item() == pytest.approx(1.45, abs=1e-15)


def test_pipemare() -> None:
    """T2 and T1 by their formulas, on numbers of our own: the notes have none."""
    weight = one()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    correction = PipeMareCorrection(optimizer, math.exp(-2), staleness=3)
    gamma = math.exp(-2 / 3)
    delta = 0.0
    for gradient in (0.25, -0.5, 0.125, 0.125):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        correction.before_update()
        optimizer.step()
        correction.after_update()
        delta = gamma * delta - (1 - gamma) * gradient
    assert correction.gamma == gamma
    assert correction.corrected(3)[0].item() == pytest.approx(1 - 3 * delta, abs=1e-15)
    assert correction.corrected(3)[0].item() != weight.item()
    assert [discounted_lr(0.1, 4, step, 100) for step in (0, 50, 100, 300)] == [
        0.025, 0.05, 0.1, 0.1,
    ]  # fmt: skip
    assert discounted_lr(0.1, 0, 0, 100) == discounted_lr(0.1, 1, 0, 100) == 0.1
    assert discounted_lr(0.1, 4, 0, 0) == 0.1
