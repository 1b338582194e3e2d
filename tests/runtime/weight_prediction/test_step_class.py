"""Optimizers of a user's own: predicted as what they really step, never silently not at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from optimizers_stepped import OPTIMIZERS, give_gradients, parameters, step
from torch import nn

from fxpart.runtime.weight_prediction import RULES, make_predictor
from fxpart.runtime.weight_prediction.difference import DifferencePredictor
from fxpart.runtime.weight_prediction.optimizer_steps import step_class
from fxpart.runtime.weights import StageWeights
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_modes import MODES, WeightMode


class Renamed(torch.optim.SGD):
    """Changes nothing."""


class Defaults(torch.optim.AdamW):
    """Other defaults, and a method that the step does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1)

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])


class Again(Defaults):
    """A subclass of a subclass."""


class Adapted(torch.optim.Adam):
    """A step of its own: half of what Adam does."""

    def step(self, closure: Any = None) -> Any:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        found = super().step(closure)
        with torch.no_grad():
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                p.lerp_(old, 0.5)
        return found


class Inner(torch.optim.SGD):
    """Changes what the step uses, not the step."""

    def _init_group(self, group: Any, params: Any, grads: Any, buffers: Any) -> Any:
        found = super()._init_group(group, params, grads, buffers)
        grads[:] = [g * 0.1 for g in grads]
        return found


class Signs(torch.optim.Optimizer):
    """No state, no momentum, no option called lr."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"size": 0.03})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["size"] * p.grad.sign())


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.inner = torch.optim.RMSprop(params, lr=0.01)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


Make = Callable[[Any], torch.optim.Optimizer]
OWN: dict[str, Make] = {
    "renamed": partial(Renamed, lr=0.05, momentum=0.9),
    "renamed-plain": partial(Renamed, lr=0.05),
    "defaults": Defaults,
    "again": Again,
    "adapted": partial(Adapted, lr=0.01),
    "inner": partial(Inner, lr=0.5),
    "signs": Signs,
    "wrapper": Wrapper,
}
BASES: dict[str, Make] = {
    "renamed": OPTIMIZERS["momentum"],
    "renamed-plain": OPTIMIZERS["sgd"],
    "defaults": partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    "again": partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
}


def looked(make: Make, rule: str, updates: int = 3) -> tuple[list[Any], list[Any], Any]:
    """Predictions after some updates, the weights, and the predictor."""
    weights = parameters()
    optimizer = make(weights)
    look = make_predictor(rule, optimizer)
    for update in range(updates):
        give_gradients(weights, update)
        look.before_update()
        optimizer.step()
        look.after_update()
    return look.predict(2), weights, look


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BASES)
def test_a_subclass_with_the_step_of_its_base_is_predicted_as_it(name: str, rule: str) -> None:
    made, _, look = looked(OWN[name], rule)
    expected, _, base = looked(BASES[name], rule)
    assert type(look) is type(base) and all(map(torch.equal, made, expected))


@pytest.mark.parametrize("name", sorted(set(OWN) - set(BASES)))
def test_a_step_of_its_own_is_repeated(name: str) -> None:
    """As far again as the last step went, for each update."""
    before = looked(OWN[name], "linear", 2)[1]
    made, weights, look = looked(OWN[name], "linear", 3)
    assert isinstance(look, DifferencePredictor)
    for new, now, old in zip(made, weights, before, strict=True):
        assert torch.allclose(new, now + 2 * (now - old), atol=1e-6)
        assert not torch.equal(new, now)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lbfgs"])
def test_linear_predicts_with_every_optimizer_of_torch(name: str) -> None:
    weights = parameters()
    optimizer = OPTIMIZERS[name](weights)
    look = make_predictor("linear", optimizer)
    for update in range(3):
        give_gradients(weights, update, sparse=name == "sparse")
        look.before_update()
        step(optimizer)
        look.after_update()
    assert not any(map(torch.equal, look.predict(1), weights))


def test_the_class_of_a_step() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    for make, expected in (
        (torch.optim.SGD, torch.optim.SGD), (Renamed, torch.optim.SGD),
        (Again, torch.optim.AdamW), (Adapted, None), (Inner, None), (Signs, None), (Wrapper, None),
        (torch.optim.Rprop, torch.optim.Rprop),
    ):  # fmt: skip
        assert step_class(make(weights)) is expected  # type: ignore[arg-type]
    scheduled = torch.optim.SGD(weights)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert step_class(scheduled) is torch.optim.SGD
    patched = torch.optim.SGD(weights)
    patched.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert step_class(patched) is None
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert step_class(scheduled) is torch.optim.SGD


def warned(make: Make, mode: WeightMode) -> list[str]:
    """What some updates of a stage warn of."""
    module = nn.Linear(3, 3)
    optimizer = make(module.parameters())
    weights = StageWeights(module, optimizer, mode, WeightVersionCounters((3, 2, 1), 1), 0)
    outs: dict[int, torch.Tensor] = {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(7):
            with weights.forward(i):
                outs[i] = module(torch.ones(1, 3))
            if i >= 2:
                with weights.backward(i - 2):
                    outs.pop(i - 2).sum().backward()
                weights.update()
                module.zero_grad()
    return [str(each.message) for each in found]


@pytest.mark.parametrize("rule", ["decaying", "shadow"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, Signs, torch.optim.Rprop])
def test_a_rule_that_predicts_nothing_warns_once(kind: Any, rule: Any) -> None:
    mode = WeightMode("custom", look_forward="staleness", rule=rule)
    make = kind if kind is Signs else partial(kind, lr=0.1)
    (text,) = warned(make, mode)
    assert "FXP109" in text and "stage 0" in text
    assert not warned(partial(torch.optim.SGD, lr=0.1, momentum=0.9), mode)
    assert not warned(partial(torch.optim.Adam, lr=0.1), mode)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.predicts])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("lbfgs", "sparse", "muon")])
def test_no_mode_is_without_prediction(name: str, mode: str) -> None:
    if not MODES[mode].flush:
        assert not warned(OPTIMIZERS[name], MODES[mode])
