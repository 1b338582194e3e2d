"""Two-buffer weights with error feedback: worked numbers, an oracle of its own, and an identity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from stage_streams import Chain
from torch import nn
from torch.nn import functional

from fxpart.emulator import Emulator
from fxpart.errors import FxpartError
from fxpart.runtime.weight_prediction import ErrorFeedback
from fxpart.schedule.weight_modes import MODES

K, STEPS = 3, 12
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.02, betas=(0.99, 0.999)),
    "muon": partial(torch.optim.Muon, lr=0.02),
}


# From f(w) = w^2 / 2, w = 1, lr = 0.1, with u = 0 before the start.
@pytest.mark.parametrize(
    ("momentum", "strength", "expected"),
    [
        (0.0, 0.0, [1, 1, 0.9, 0.8, 0.71, 0.63, 0.559, 0.496]),
        (0.0, 1.0, [1, 1, 0.8, 0.7, 0.64, 0.58, 0.522, 0.47]),
        (0.9, 0.0, [1, 1, 0.9, 0.71, 0.449, 0.1431, -0.17711]),
        (0.9, 1.0, [1, 1, 0.8, 0.52, 0.208, -0.0968, -0.36072]),
    ],
)
def test_worked_numbers(momentum: float, strength: float, expected: list[float]) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
    feedback = ErrorFeedback([weight], strength)
    feedback.load_state_dict({"last": [torch.zeros_like(weight)]})
    found = [1.0, 1.0]
    while len(found) < len(expected):
        weight.grad = torch.full_like(weight, found[-2])
        before = [weight.detach().clone()]
        optimizer.step()
        feedback.after_update(before)
        found.append(weight.item())
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("strength", "momentum", "limit"),
    [(0.0, 0.9, 0.1), (0.5, 0.9, 0.16886), (1.0, 0.9, 0.27016), (0.5, 0.0, 0.82843),
     (1.0, 0.0, 0.61803)],
)  # fmt: skip
def test_the_largest_stable_rate(strength: float, momentum: float, limit: float) -> None:
    for factor, shrinks in ((0.98, True), (1.02, False)):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=factor * limit, momentum=momentum)
        feedback, found = ErrorFeedback([weight], strength), [1.0, 1.0]
        for _ in range(4000):
            weight.grad = torch.full_like(weight, found[-2])
            before = [weight.detach().clone()]
            optimizer.step()
            feedback.after_update(before)
            found.append(weight.item())
            if abs(found[-1]) > 1e12:
                break
        assert (max(map(abs, found[-20:])) < 1) == shrinks


def model() -> nn.Sequential:
    """Matrices alone, so that Muon can step them."""
    torch.manual_seed(0)
    layers = [m for _ in range(K) for m in (nn.Linear(4, 4, bias=False), nn.Tanh())]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(6, 4, generator=draw, dtype=torch.float64),
            torch.randn(6, 4, generator=draw, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


def gradients(module: nn.Module, weights: list[torch.Tensor], batch: Any) -> list[torch.Tensor]:
    """Of the mean loss at these weights, by torch alone."""
    names = [name for name, _ in module.named_parameters()]
    leaves = [w.detach().clone().requires_grad_() for w in weights]
    out = torch.func.functional_call(module, dict(zip(names, leaves, strict=True)), (batch[0],))
    return list(torch.autograd.grad(functional.mse_loss(out, batch[1]), leaves))


def predicted_by_difference(make: Make) -> list[torch.Tensor]:
    """2BW whose passes read z_t + (z_t - z_{t-1}), with z_t trained without feedback."""
    module = model()
    optimizer, own = make(module.parameters()), list(module.parameters())
    reads = [[p.detach().clone() for p in own]]
    for number, batch in enumerate(batches()):
        before = [p.detach().clone() for p in own]
        for p, g in zip(own, gradients(module, reads[max(0, number - 1)], batch), strict=True):
            p.grad = g
        optimizer.step()
        if number:
            reads.append([2 * p.detach() - w for p, w in zip(own, before, strict=True)])
            continue
        reads.append([p.detach().clone() for p in own])  # the first update is not late
        with torch.no_grad():
            for p, w in zip(own, before, strict=True):
                p.copy_(w)
    return reads[-1]


def fed_back(make: Make, strength: float) -> list[torch.Tensor]:
    """x_{t+1} = x_t - u_{t-1} - b (u_{t-1} - u_{t-2}), every x kept."""
    module = model()
    optimizer, own = make(module.parameters()), list(module.parameters())
    kept, last = [[p.detach().clone() for p in own]], None
    for number, batch in enumerate(batches()):
        for p, g in zip(own, gradients(module, kept[max(0, number - 1)], batch), strict=True):
            p.grad = g
        optimizer.step()
        update = [w - p.detach() for w, p in zip(kept[-1], own, strict=True)]
        if last is not None:
            with torch.no_grad():
                for p, u, before in zip(own, update, last, strict=True):
                    p.sub_(strength * (u - before))
        last = update
        kept.append([p.detach().clone() for p in own])
    return kept[-1]


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_oracle(name: str, strength: float) -> None:
    """In the emulator and in stages of their own, in double precision."""
    mode = replace(MODES["2bw-ef"], feedback=strength)
    expected = fed_back(OPTIMIZERS[name], strength)
    module = model()
    stages = [module[2 * k : 2 * k + 2] for k in range(K)]
    Chain(stages, mode, K, OPTIMIZERS[name], functional.mse_loss).run(batches())
    emulator = emulated()
    run = emulator.run(batches(), mode, OPTIMIZERS[name], STEPS)
    for parameter, (key, _), weight in zip(
        module.parameters(), module.named_parameters(), expected, strict=True
    ):
        assert (parameter - weight).abs().max() < 1e-12
        assert (run.state_dict[key] - weight).abs().max() < 1e-12
    plain = emulator.run(batches(), "2bw", OPTIMIZERS[name], STEPS).state_dict
    assert max(float((plain[n] - w).abs().max()) for n, w in run.state_dict.items()) > 1e-4


@cache
def emulated() -> Emulator:
    example = batches()[0]
    return Emulator(model(), stages=K, microbatches=K, loss=nn.MSELoss(), example_inputs=example)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adamw0", "nadam", "muon0"])
def test_it_is_the_difference_one_update_ahead(name: str) -> None:
    """Without decoupled decay, which would act on x here and on z there."""
    make = {
        **OPTIMIZERS, "adamw0": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.0),
        "muon0": partial(torch.optim.Muon, lr=0.02, weight_decay=0.0),
    }[name]  # fmt: skip
    run = emulated().run(batches(), "2bw-ef", make, STEPS)
    for weight, expected in zip(
        run.state_dict.values(), predicted_by_difference(make), strict=True
    ):
        assert (weight - expected).abs().max() < 1e-12


def test_what_does_not_go_with_it() -> None:
    for mode in (replace(MODES["stash"], feedback=1.0), replace(MODES["naive"], feedback=0.5)):
        with pytest.raises(FxpartError, match="one step late"):
            Chain([copy.deepcopy(model())], mode, 1, OPTIMIZERS["sgd"], functional.mse_loss)
