"""What a prediction allocates: its result, and a block to work in."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from live_bytes import live
from torch import nn
from transient_bytes import Peak

from fxpart.runtime.weight_prediction import PipeMareCorrection, make_predictor

NUMBERS = 1 << 21
MAKE = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "decay": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
}
# In sizes of the model: kept between predictions, and allocated by one.
EXPECTED = [
    ("linear", "momentum", 0, 1),
    ("linear", "nesterov", 1, 1),
    ("linear", "adam", 0, 1),
    ("linear", "adamw", 0, 1),
    ("linear", "nadam", 1, 1),
    ("decaying", "momentum", 0, 1),
    ("decaying", "decay", 0, 1),
    ("decaying", "nesterov", 0, 1),
    ("decaying", "adamw", 0, 1),
    ("difference", "adamw", 1, 1),
    ("shadow", "momentum", 2, 1),
    ("shadow", "adamw", 3, 3),  # two of them within torch's step
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "name", "kept", "allocated"), EXPECTED)
def test_a_prediction(rule: str, name: str, kept: int, allocated: int) -> None:
    weights = [nn.Parameter(torch.randn(NUMBERS)), nn.Parameter(torch.randn(3, 5))]
    optimizer = MAKE[name](weights)
    for p in weights:
        p.grad = torch.randn_like(p)
    size = NUMBERS * 4
    warm_up(rule, name)
    before = live()
    look = make_predictor(rule, optimizer)
    look.before_update()
    optimizer.step()
    look.after_update()
    state = sum(
        t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)
    )
    look.predict(3)
    assert live() - before - state == pytest.approx(kept * size, abs=0.02 * size)
    assert look.state_bytes() == pytest.approx(kept * size, abs=0.01 * size)
    with Peak() as peak:
        made = look.predict(3)
    assert peak.most / size < allocated + 0.2
    assert live() - peak.start == pytest.approx(size, abs=0.02 * size)
    with Peak() as none:
        same = look.predict(0)
    assert none.most < 0.01 * size
    del made, same


def warm_up(rule: str, name: str) -> None:
    """The same in small, so that nothing is imported or collected meanwhile."""
    weights = [nn.Parameter(torch.ones(3))]
    weights[0].grad = torch.ones(3)
    optimizer = MAKE[name](weights)
    look = make_predictor(rule, optimizer)
    look.before_update()
    optimizer.step()
    look.after_update()
    with Peak():
        look.predict(3)
    gc.collect()


@pytest.mark.slow
def test_a_correction() -> None:
    weights = [nn.Parameter(torch.randn(NUMBERS))]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    weights[0].grad = torch.randn(NUMBERS)
    size = NUMBERS * 4
    warm_up("linear", "momentum")
    before = live()
    with Peak() as peak:
        correction = PipeMareCorrection(optimizer)
        correction.before_update()
        optimizer.step()
        correction.after_update()
    assert live() - before == pytest.approx(size, abs=0.02 * size) and peak.most < 1.02 * size
    assert correction.state_bytes() == size
    with Peak() as peak:
        made = correction.corrected(3)
    assert peak.most == pytest.approx(made[0].nbytes, abs=0.02 * size)
