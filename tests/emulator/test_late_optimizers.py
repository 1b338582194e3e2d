"""NAdam, Muon and basis rotation in every mode, and every mode's worked numbers, to 1e-12."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import asynchronous_models as models
import asynchronous_reference as reference
import pytest
import torch
from stage_streams import Chain
from torch import nn
from torch.nn import functional

from fxpart.emulator import Emulator
from fxpart.optim import BasisRotation, Muon
from fxpart.schedule.versions import WeightVersionCounters, count_chain_warmup
from fxpart.schedule.weight_modes import MODES

pytestmark = pytest.mark.slow
STEPS, STAGES = 9, 3


@dataclass(frozen=True)
class AnyOptimizer:
    """An update by a torch optimizer of one copied parameter; it predicts by the last difference.

    Nothing is kept between updates but what the reference passes on.
    """

    make: Any

    def rate(self, update: int) -> float:
        """The rate is constant."""
        return 1.0

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, rate: float) -> Any:
        """The weight and state after one update. rate: 1, or PipeMare's discount."""
        parameter = nn.Parameter(weight.clone())
        optimizer = self.make([parameter])
        optimizer.param_groups[0]["lr"] *= rate
        if state:
            optimizer.state[parameter] = copy.deepcopy(state["own"])
        parameter.grad = gradient.clone()
        optimizer.step()
        return parameter.detach(), {"own": optimizer.state[parameter], "before": weight}

    def predict(self, weight: torch.Tensor, state: Any, rates: list[float], step: int) -> Any:
        """W + s (W - W before the last update)."""
        return weight + len(rates) * (weight - state["before"]) if rates and state else weight


OPTIMIZERS: dict[str, Any] = {
    "nadam": partial(torch.optim.NAdam, lr=0.02, betas=(0.99, 0.999)),
    "muon": partial(Muon, lr=0.02, other_lr=0.5),
    "rotation": partial(BasisRotation, lr=0.02, refresh=3, eps=1e-4),
    # One side: the rows of the last layer's mean sum to 0, which leaves a part of the other open.
    "rotation by the mean": partial(
        BasisRotation, lr=0.02, refresh=3, eps=1e-4, source="1st", geometry="uni"
    ),
}


@cache
def built() -> tuple[Emulator, Any, dict[str, torch.Tensor], list[Any], dict[str, int]]:
    """An emulator of an MLP in double precision, its passes by hand, weights, data and stages."""
    torch.manual_seed(0)
    module = models.mlp(4).double()
    batches = [(x.double(), y) for x, y in models.mlp_batches(STEPS, 6)]
    emulator = Emulator(
        module, stages=STAGES, loss=functional.cross_entropy, example_inputs=batches[0]
    )
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    stages = emulator.program.spec.stages
    at = {s.name: g.index for g in stages for s in g.state if s.kind == "parameter"}
    return emulator, models.HandMlp(list(weights)), weights, batches, at


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode: str, name: str) -> None:
    emulator, passes, weights, batches, at = built()
    count = STAGES if MODES[mode].base == "delayed" else 1
    run = emulator.run(batches, mode, OPTIMIZERS[name], STEPS, microbatches=count)
    total = STEPS if MODES[mode].discount else None
    hand: Any = AnyOptimizer(OPTIMIZERS[name])
    known = reference.Reference(passes, at, STAGES, count, mode, hand, total)
    losses, expected = known.train(weights, batches)
    assert run.losses == pytest.approx([float(loss) for loss in losses], abs=1e-12)
    for key, weight in expected.items():
        assert (run.state_dict[key] - weight).abs().max() < 1e-12, key


# SpecTrain's common horizon is not here: it is shorter than the notes' while the pipeline fills.
# y = w2 w1 w0 x, loss (y - 1)^2 / 2, x = 1, all w = 0.5, lr = 0.1, six minibatches: w0, w1, w2.
CHAIN = {
    ("sync", 1): ([0.654178] * 3, [0.959991] * 3),
    ("stash", 1): ([0.651057, 0.646676, 0.641862], [0.958619, 0.938749, 0.912472]),
    ("naive", 1): ([0.656655, 0.646788, 0.641969], [0.991682, 0.938906, 0.912611]),
    ("vertical", 1): ([0.640006] * 3, [0.909566] * 3),
    ("spectrain-v2", 1): ([0.653161, 0.651012, 0.649965], [0.961368, 0.943613, 0.932826]),
    ("pipeoptim", 1): ([0.654385, 0.651155, 0.650102], [0.973920, 0.943774, 0.932980]),
    ("naive", 2): ([0.570616, 0.568583, 0.567626], [0.630852, 0.626968, 0.625151]),
    ("2bw", 3): ([0.543750] * 3, [0.563438] * 3),
    ("sync", 3): ([0.545239] * 3, [0.564927] * 3),
}


@cache
def chain() -> Emulator:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).double()
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    example = torch.ones(6, 1).double(), torch.ones(6, 1).double()
    loss = lambda y, t: (y - t).square().mean() / 2  # noqa: E731
    return Emulator(model, stages=3, loss=loss, example_inputs=example)


@pytest.mark.parametrize(("mode", "count"), CHAIN)
def test_the_worked_chain(mode: str, count: int) -> None:
    """The notes' numbers; with a microbatches per update, naive weights are PACI."""
    ones = torch.ones(6, 1).double()
    for momentum, expected in zip((0.0, 0.9), CHAIN[mode, count], strict=True):
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        run = chain().run([(ones, ones)], mode, sgd, 6 // count, microbatches=count)
        found = [float(weight) for weight in run.state_dict.values()]
        assert found == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize(("every", "bound"), [(1, 7), (2, 4), (4, 2), (8, 1)])
def test_paci_crosses_no_more_updates_than_its_bound(every: int, bound: int) -> None:
    """ceil((K - 1) / a), counted at every backward of eight real stages, and reached."""
    torch.manual_seed(0)
    stages = [nn.Linear(2, 2) for _ in range(8)]
    sgd = partial(torch.optim.SGD, lr=0.01)
    data = [(torch.randn(8, 2), torch.randn(8, 2)) for _ in range(4 + 16 // every)]
    run = Chain(stages, "naive", every, sgd, functional.mse_loss)
    run.run(data)
    versions = WeightVersionCounters(count_chain_warmup(8), every)
    for k, stage in enumerate(run.stages):
        used = stage.weights.counters().recent
        assert len(used) == every * len(data)
        crossed = max(use.backward - use.forward for use in used)
        assert crossed == versions.gap(k) == -(-(7 - k) // every) <= bound
        assert stage.weights.most == 1
    assert versions.gap(0) == bound
