"""Every optimizer class in every mode that predicts: nearer to what is read later, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hand_stages import language
from torch import nn

from fxpart.errors import FxpartError
from fxpart.optim import BasisRotation, Muon, RowWiseAdagrad
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.weight_prediction import SpikeCompensatedSGD
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode

STAGES, UPDATES = 3, 28
SETTLED = 12  # RAdam takes steps of another size from its sixth update on
RATES = {
    "SGD": 0.05, "ASGD": 0.05, "Adagrad": 0.002, "Adadelta": 0.3, "RMSprop": 3e-4, "Signs": 0.002,
    "Bare": 0.05, "SpikeCompensatedSGD": 0.005,
}  # fmt: skip
PREDICTING = [name for name, mode in MODES.items() if mode.predicts and not mode.flush]


class Bare(torch.optim.SGD):
    """Changes nothing."""


class Signs(torch.optim.Optimizer):
    """A user's own step, without state."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


def every_class() -> list[type[torch.optim.Optimizer]]:
    return [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]


REFUSED = {torch.optim.LBFGS: "FXP115", torch.optim.SparseAdam: "FXP109"}
OWN = [Bare, Signs, SpikeCompensatedSGD, BasisRotation, Muon, RowWiseAdagrad]
STEPPED = [kind for kind in [*every_class(), *OWN] if kind not in REFUSED]


def streamed(make: Any, mode: WeightMode) -> tuple[list[float], list[str]]:
    """ρ of each microbatch of the first stage of three, and what was warned of."""
    draw = torch.Generator().manual_seed(0)
    module = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    x, y = (torch.randn(16, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        module.weight.copy_(torch.eye(4) * 2)
    optimizer = make(module.parameters())
    ahead = tuple(range(STAGES, 0, -1))
    weights = StageWeights(module, optimizer, mode, WeightVersionCounters(ahead, 1), 0)
    weights.watch(1)
    outs: dict[int, torch.Tensor] = {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(UPDATES):
            with weights.forward(i):
                outs[i] = (module(x) - y).square().mean()
            if (done := i + 1 - STAGES) >= 0:
                with weights.backward(done):
                    outs.pop(done).backward()
                weights.update()
                optimizer.zero_grad()
    texts = [str(each.message) for each in found if "FXP" in str(each.message)]
    return [rho for microbatch, rho in weights.rhos() if microbatch >= SETTLED], texts


@pytest.mark.parametrize("kind", STEPPED, ids=lambda kind: kind.__name__)
def test_predictions_are_closer_than_stale_weights(kind: Any) -> None:
    """Of weights that move on steadily, in every mode, and nothing is warned of."""
    make = partial(kind, lr=RATES.get(kind.__name__, 0.002))
    for mode in PREDICTING:
        rhos, texts = streamed(make, MODES[mode])
        assert len(rhos) >= UPDATES - SETTLED - 2 * STAGES and not texts, mode
        assert max(rhos) < 1, (mode, max(rhos))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", PREDICTING)
def test_what_cannot_be_stepped_is_refused_once(kind: Any, mode: str) -> None:
    """A closure, or sparse gradients: before the first update, by one error."""
    hand = language((2, 2), tied=False)
    with pytest.raises(FxpartError) as raised:
        Trainer(
            hand.spec(), dict(enumerate(hand.stages)), ranks=range(2), transport=InProcess(2),
            microbatches=1, optimizer=kind, weights=mode,
        )  # fmt: skip
    assert {problem.code for problem in raised.value.problems} == {REFUSED[kind]}
