"""The options of coming updates are those that the real scheduler then sets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from optimizers_stepped import bits, give_gradients, parameters, same_bits
from torch.optim import lr_scheduler as s
from torch.optim.swa_utils import SWALR

from fxpart.errors import FxpartError
from fxpart.runtime.weight_prediction import RULES, make_predictor
from fxpart.runtime.weight_prediction.future_options import FutureOptions, plain_options

Make = Callable[[torch.optim.Optimizer], s.LRScheduler]


def _sequence(optimizer: torch.optim.Optimizer) -> s.LRScheduler:
    warm = s.LinearLR(optimizer, 0.1, total_iters=3)
    return s.SequentialLR(optimizer, [warm, s.CosineAnnealingLR(optimizer, 9)], [3])


def _chain(optimizer: torch.optim.Optimizer) -> s.LRScheduler:
    return s.ChainedScheduler([s.ConstantLR(optimizer, 0.5, 4), s.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Make] = {
    "lambda": partial(s.LambdaLR, lr_lambda=[lambda n: 1 / (1 + n), lambda n: 0.9**n]),
    "multiplicative": partial(s.MultiplicativeLR, lr_lambda=lambda n: 0.95 if n % 2 else 1.0),
    "step": partial(s.StepLR, step_size=2),
    "multistep": partial(s.MultiStepLR, milestones=[2, 3, 7]),
    "constant": partial(s.ConstantLR, factor=0.5, total_iters=3),
    "linear": partial(s.LinearLR, start_factor=0.1),
    "exponential": partial(s.ExponentialLR, gamma=0.9),
    "polynomial": partial(s.PolynomialLR, total_iters=6, power=2),
    "cosine": partial(s.CosineAnnealingLR, T_max=7),
    "restarts": partial(s.CosineAnnealingWarmRestarts, T_0=3),
    "cyclic": partial(s.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "cyclic2": partial(s.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2, mode="triangular2"),
    "onecycle": partial(s.OneCycleLR, max_lr=0.1, total_steps=20),
    "swa": partial(SWALR, swa_lr=0.01, anneal_epochs=5),
    "sequence": _sequence,
    "chain": _chain,
}  # fmt: skip


def sgd(lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    """Two groups of their own rates."""
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr  # schedulers write into it
    first, *others = parameters(torch.float64)
    groups = [{"params": [first]}, {"params": others, "lr": lr * 2}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def update(optimizer: torch.optim.Optimizer, scheduler: s.LRScheduler, seed: int) -> None:
    """A step of both."""
    give_gradients([p for g in optimizer.param_groups for p in g["params"]], seed)
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize(
    "lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["float", "tensor"]
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler(name: str, lr: float | torch.Tensor) -> None:
    optimizer = sgd(lr)
    scheduler = SCHEDULERS[name](optimizer)
    coming = FutureOptions(optimizer, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            before = bits(optimizer)
            short, looked = coming.groups(2), coming.groups(6)
            assert short == looked[:2] and same_bits(before, bits(optimizer))
            twin = sgd(lr)
            its = SCHEDULERS[name](twin)
            for past in range(number):
                update(twin, its, past)
            for groups in looked:
                assert groups == plain_options(twin)
                update(twin, its, 0)
            update(optimizer, scheduler, number)
            coming.forget()
    assert looked[0] != looked[5] or name == "constant"


def test_every_scheduler_of_torch_is_tried() -> None:
    kinds = {
        kind
        for kind in vars(s).values()
        if isinstance(kind, type) and issubclass(kind, s.LRScheduler) and kind.__name__[0] != "_"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tried = {type(make(sgd())) for make in SCHEDULERS.values()}
    assert kinds - tried == {s.LRScheduler, s.ReduceLROnPlateau}


def test_nothing_known_and_nothing_stepped() -> None:
    optimizer = sgd()
    plateau = s.ReduceLROnPlateau(optimizer, patience=0)
    for scheduler in (plateau, None):
        coming = FutureOptions(optimizer, scheduler)
        assert [g["lr"] for groups in coming.groups(3) for g in groups] == [0.1, 0.2] * 3
    optimizer.param_groups[0]["lr"] = 0.3  # by hand, without telling
    assert coming.groups(1)[0][0]["lr"] == 0.3


def test_a_scheduler_that_cannot_be_copied() -> None:
    optimizer = sgd()
    scheduler = s.ExponentialLR(optimizer, 0.9)
    scheduler.numbers = (n for n in range(3))  # type: ignore[attr-defined]
    with pytest.raises(FxpartError, match="weight prediction needs a copy"):
        FutureOptions(optimizer, scheduler).groups(2)
    assert len(FutureOptions(optimizer, scheduler).groups(1)) == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["cosine", "onecycle", "sequence"])
def test_every_rule_uses_the_coming_rates(rule: str, name: str) -> None:
    """OneCycleLR changes the momentum too."""
    optimizer = sgd()
    scheduler = SCHEDULERS[name](optimizer)
    look = make_predictor(rule, optimizer, scheduler=scheduler)
    for number in range(3):
        give_gradients(look.parameters, number)  # type: ignore[arg-type]
        look.before_update()
        used = [g["lr"] for g in optimizer.param_groups]
        before = [p.detach().clone() for p in look.parameters]
        optimizer.step()
        look.after_update()
        scheduler.step()
    made, now = look.predict(3), [p.detach().clone() for p in look.parameters]
    options = FutureOptions(optimizer, scheduler).groups(3)
    for place, p in enumerate(look.parameters):
        group = 0 if place == 0 else 1
        v = optimizer.state[p]["momentum_buffer"]
        rates = [groups[group]["lr"] for groups in options]
        assert len(set(rates)) == 3
        if rule == "linear":
            expected = now[place] - sum(rates) * v
        elif rule == "difference":
            expected = now[place] + sum(rates) / used[group] * (now[place] - before[place])
        else:
            expected, left = now[place], v
            for groups in options:
                left = groups[group]["momentum"] * left
                expected = expected - groups[group]["lr"] * left
        assert torch.allclose(made[place], expected, atol=1e-14, rtol=0)
