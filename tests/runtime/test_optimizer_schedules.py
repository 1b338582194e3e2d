"""Schedulers of the user's own optimizer, and the optimizer that a trainer shows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_models import LAYOUTS, REPLICATED, batches, difference, perceptron, program, step
from torch import nn
from torch.optim import lr_scheduler as rates

from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    """A warm-up that begins at a hundredth, then another schedule."""
    first = rates.LinearLR(optimizer, 0.01, total_iters=2)
    return rates.SequentialLR(optimizer, [first, rates.ExponentialLR(optimizer, 0.5)], [2])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: rates.LambdaLR(o, lambda n: 1 / (1 + n)),
    "sequence": warmed,
    "one cycle": partial(rates.OneCycleLR, max_lr=0.2, total_steps=8),
    "cyclic": partial(rates.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2),
    "restarts": partial(rates.CosineAnnealingWarmRestarts, T_0=3),
    "chained": lambda o: rates.ChainedScheduler(
        [rates.ConstantLR(o, 0.1, total_iters=2), rates.ExponentialLR(o, 0.9)]
    ),
    "multiplied": lambda o: rates.MultiplicativeLR(o, lambda n: 0.7),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that each has a rate of its own."""
    head = {"params": model[3].parameters(), "lr": 0.05}
    return torch.optim.SGD(
        [{"params": [*model[0].parameters(), *model[1].parameters()]}, head],
        lr=0.1, momentum=0.9, weight_decay=0.01,
    )  # fmt: skip


def plain_run(make: Callable[..., Any]) -> nn.Module:
    model = perceptron()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    for batch in batches(6):
        step(model, optimizer, batch)
        scheduler.step()
    return model


@pytest.mark.parametrize("layout", ["stages", "zero1"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_of_the_instance_in_an_own_loop(name: str, layout: str) -> None:
    model = perceptron()
    scheduler = SCHEDULES[name](mine := sgd(model))
    trainer = program(model, layout, mine).trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for batch in batches(6):
            mine.zero_grad()
            trainer.step(batch)
            scheduler.step()
    assert difference(trainer.state_dict(), plain_run(SCHEDULES[name])) < 1e-6
    shown = [group["lr"] for group in trainer.optimizer.param_groups]
    assert shown == [group["lr"] for group in mine.param_groups]


@pytest.mark.parametrize("name", ["lambda", "sequence", "one cycle"])
def test_a_scheduler_of_the_instance_in_fit(name: str) -> None:
    model = perceptron()
    trainer = program(model, "stages").trainer(mine := sgd(model))
    scheduler = SCHEDULES[name](mine)  # made after the trainer
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.fit(batches(6), scheduler=scheduler)
    assert difference(trainer.state_dict(), plain_run(SCHEDULES[name])) < 1e-6


def test_a_plateau_of_the_instance() -> None:
    """The rate falls when a loss stays, in an own loop and by evaluations of fit."""
    plateau = partial(rates.ReduceLROnPlateau, factor=0.1, patience=0, threshold=10.0)
    model, plain = perceptron(), perceptron()
    mine, reference = sgd(model), sgd(plain)
    schedulers = plateau(mine), plateau(reference)
    trainer = program(model, "replicas", mine).trainer()
    for batch in batches(5):
        schedulers[0].step(trainer.step(batch))
        schedulers[1].step(step(plain, reference, batch))
    assert difference(trainer.state_dict(), plain) < 1e-6
    assert mine.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < 1e-3
    with pytest.raises(FxpartError, match="FXP115"):
        trainer.fit(batches(2), scheduler=schedulers[0])
    trainer.fit(batches(2), scheduler=schedulers[0], evaluate=batches(1), every=1)
    assert trainer.optimizer.param_groups[0]["lr"] == mine.param_groups[0]["lr"] < 1e-6


def test_options_set_by_hand_reach_every_stage() -> None:
    """In the instance and in what the trainer shows; rates that are tensors, too."""
    model, plain = perceptron(), perceptron()

    def make(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01))

    mine, reference = make(model), make(plain)
    trainer = program(model, "stages", mine).trainer()
    for at, batch in enumerate(batches(5)):
        for each in (trainer.optimizer if at % 2 else mine, reference):
            each.param_groups[0]["lr"].fill_(0.01 * (at + 1))
            each.param_groups[0]["weight_decay"] = 0.1 * at
            each.param_groups[0]["betas"] = (0.9 - 0.1 * at, 0.99)
        trainer.step(batch)
        step(plain, reference, batch)
    assert difference(trainer.state_dict(), plain) < 1e-6


def others(model: nn.Module, trainer: Any) -> dict[str, Any]:
    """Schedulers of optimizers that the trainer does not have."""
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = next(iter(trainer.optimizers.by_place.values()))
    return {
        "foreign": rates.StepLR(foreign, 1),
        "copied": copy.deepcopy(rates.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)),
        "chained": rates.ChainedScheduler([rates.StepLR(foreign, 1)]),
        "of one stage": rates.StepLR(inner, 1),
        "plateau": rates.ReduceLROnPlateau(foreign),
    }


@pytest.mark.parametrize("name", ["foreign", "copied", "chained", "of one stage", "plateau"])
def test_a_scheduler_of_another_optimizer_is_refused(name: str) -> None:
    model = perceptron()
    trainer = program(model, "stages").trainer(torch.optim.SGD)
    before = trainer.state_dict()
    with pytest.raises(FxpartError, match="another optimizer") as caught:
        trainer.fit(batches(2), scheduler=others(model, trainer)[name], evaluate=batches(1))
    assert caught.value.code == "FXP115"
    after = trainer.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    trainer.fit(batches(2), scheduler=rates.StepLR(trainer.optimizer, 1))


def test_a_run_that_resumes_goes_on_with_the_rates(tmp_path: Any) -> None:
    plain = plain_run(SCHEDULES["multiplied"])
    for steps in (3, 6):
        model = perceptron()
        mine = sgd(model)
        trainer = program(model, "stages", mine).trainer()
        scheduler = SCHEDULES["multiplied"](mine)
        trainer.fit(batches(6), steps=steps, scheduler=scheduler, checkpoints=str(tmp_path / "a"))
        trainer.close()
    assert mine.param_groups[0]["lr"] == pytest.approx(0.1 * 0.7**6)
    assert difference(trainer.state_dict(), plain) < 1e-6


# -- what the trainer shows -----------------------------------------------------------------


@pytest.mark.parametrize("layout", REPLICATED)
@pytest.mark.parametrize("whose", ["shown", "own"])
def test_a_step_by_hand_updates(layout: str, whose: str) -> None:
    model, plain = perceptron(), perceptron()
    mine, reference = sgd(model), sgd(plain)
    trainer = program(model, layout, mine).trainer()
    optimizer = mine if whose == "own" else trainer.optimizer
    for batch in batches(3):
        optimizer.zero_grad()
        trainer.backward(batch)
        optimizer.step()
        step(plain, reference, batch)
    assert difference(trainer.state_dict(), plain) < 1e-6
    trainer.backward(batches(1)[0])
    optimizer.zero_grad()
    optimizer.step()  # there is nothing to update with
    assert difference(trainer.state_dict(), plain) < 1e-6


def test_calls_that_cannot_be_right_are_refused() -> None:
    trainer = program(perceptron(), "stages").trainer(torch.optim.AdamW)
    trainer.step(batches(1)[0])
    shown = trainer.optimizer
    for call in (
        shown.step,
        lambda: shown.step(lambda: torch.zeros(())),
        lambda: shown.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        shown.state_dict,
        lambda: shown.load_state_dict({}),
        lambda: shown.register_step_post_hook(print),
    ):
        with pytest.raises(FxpartError) as caught:
            call()
        assert caught.value.code == "FXP115"


def clamp_data(parameters: list[torch.Tensor]) -> None:
    for p in parameters:
        p.data.clamp_(-0.05, 0.05)


def shrink(parameters: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)


def unit_norm(parameters: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p in parameters:
            if p.dim() > 1:
                p.div_(p.norm(dim=1, keepdim=True))


def noise(parameters: list[torch.Tensor]) -> None:
    torch.manual_seed(3)
    for p in parameters:
        p.data.add_(torch.randn_like(p), alpha=0.01)


@pytest.mark.parametrize("edit", [clamp_data, shrink, unit_norm, noise])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_written_in_place_count_or_are_refused(layout: str, edit: Any) -> None:
    model, plain = perceptron(), perceptron()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = program(model, layout).trainer(partial(torch.optim.SGD, lr=0.1))
    given = batches(4)
    trainer.step(given[0])
    step(plain, reference, given[0])
    if layout not in REPLICATED:
        with pytest.raises(FxpartError, match="FXP115"):
            edit(trainer.optimizer.param_groups[0]["params"])
        return
    for batch in given[1:]:
        edit([p for group in trainer.optimizer.param_groups for p in group["params"]])
        edit([p for group in reference.param_groups for p in group["params"]])
        found = trainer.eval_step(batch)
        assert torch.allclose(found, nn.functional.mse_loss(plain(batch[0]), batch[1]), atol=1e-6)
        assert difference(trainer.state_dict(), plain) < 1e-6
        trainer.step(batch)
        step(plain, reference, batch)
    assert difference(trainer.state_dict(), plain) < 1e-6


@pytest.mark.parametrize("layout", ["stages", "replicas"])
def test_gradients_changed_before_their_sum_are_refused(layout: str) -> None:
    trainer = program(perceptron(), layout).trainer(torch.optim.SGD)
    trainer.backward(batches(1)[0])
    before = trainer.state_dict()
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1e-3)
    with pytest.raises(FxpartError, match="FXP115"):
        trainer.update()
    after = trainer.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
