"""Trainers from queues: options by update, saving in the middle, recomputation, own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from queued_batches import ROWS, batch
from queued_programs import model, plan, program, trainer
from ranks import Pool
from torch import nn
from torch.optim import lr_scheduler

import fxpart
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.1)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.6),
    "warm-up": partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=4),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda u: (u + 1) / 4),
}


def plain(name: str) -> dict[str, torch.Tensor]:
    """The weights of plain PyTorch with the scheduler stepped after each update."""
    net = model()
    optimizer = SGD(net.parameters())
    scheduler = SCHEDULES[name](optimizer)
    for step, rows in enumerate(ROWS):
        x, ids, y = batch(rows, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x, ids), y).backward()
        optimizer.step()
        scheduler.step()
    return {n: t.detach().clone() for n, t in net.state_dict().items()}


def looped(text: str, name: str, staleness: int) -> dict[str, Any]:
    """Weights after a loop of step and scheduler.step."""
    made = program(Plan.loads(text)).trainer(SGD, routing="queue", staleness=staleness)
    scheduler = SCHEDULES[name](made.optimizer)
    for step, rows in enumerate(ROWS):
        made.step(batch(rows, step))
        scheduler.step()
    state = {n: t.tolist() for n, t in made.state_dict().items()}
    made.close()
    return state


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_in_a_loop_is_that_of_one_process(name: str) -> None:
    same(looped(plan((2, 1)).dumps(), name, 0), plain(name))


def test_on_ranks_too(pool: Pool) -> None:
    for found in pool.run(looped, plan((2, 1)).dumps(), "lambda", 0, ranks=3, timeout=120.0):
        same(found, plain("lambda"))


@pytest.mark.parametrize("staleness", [1, 2])
def test_every_copy_updates_with_the_rate_of_the_minibatch(staleness: int) -> None:
    made = trainer(plan((2, 1)), SGD, staleness=staleness)
    rates: list[list[float]] = []
    for each in made.optimizers.by_place.values():
        mine: list[float] = []
        rates.append(mine)
        each.register_step_pre_hook(lambda o, a, k, mine=mine: mine.append(o.param_groups[0]["lr"]))
    scheduler = SCHEDULES["lambda"](made.optimizer)
    for step, rows in enumerate(ROWS):
        made.step(batch(rows, step))
        scheduler.step()
    made.drain()
    expected = [0.1 * (step + 1) / 4 for step in range(len(ROWS))]
    assert rates == [pytest.approx(expected)] * 3


def test_the_optimizer_is_refused_what_it_cannot_do() -> None:
    made = trainer(plan((1, 1)), SGD, staleness=2)
    for step in range(3):
        made.step(batch(12, step))
    for call in (made.optimizer.step, made.optimizer.state_dict):
        with pytest.raises(FxpartError) as raised:
            call()
        assert raised.value.code == "FXP115"
    if made.in_flight:
        with pytest.raises(FxpartError) as raised:
            made.optimizer.param_groups[0]["params"]
        assert raised.value.code == "FXP115"
    made.drain()
    with torch.no_grad():
        for p in made.optimizer.param_groups[0]["params"]:
            p.data.clamp_(-0.01, 0.01)
    assert max(float(t.abs().max()) for t in made.state_dict().values()) <= 0.0101


@pytest.mark.parametrize("mode", ["naive", "pipeoptim", "stash", "spectrain-v2"])
def test_recomputed_activations_change_nothing(mode: str) -> None:
    states = []
    for recompute in ("none", "full", "selective"):
        made = trainer(plan((1, 1)), SGD, staleness=2, weight_mode=mode, recompute=recompute)
        for step, rows in enumerate(ROWS):
            made.step(batch(rows, step))
        states.append(made.state_dict())
        made.close()
    for other in states[1:]:
        assert all(torch.equal(value, other[name]) for name, value in states[0].items())


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_saving_in_the_middle(staleness: int, tmp_path: Path) -> None:
    """Every minibatch counts; training goes on from there as where it was saved."""
    made = trainer(plan((1, 1)), SGD, staleness=staleness)
    for step in range(4):
        made.step(batch(12, step))
    path = made.save_checkpoint(tmp_path)
    assert path.name == "step-0000000004"
    again = trainer(plan((1, 1)), SGD, staleness=staleness)
    again.load_checkpoint(path)
    assert again.updates == made.updates == 4
    for each in (made, again):
        for step in range(4, 6):
            each.step(batch(12, step))
    found, expected = again.state_dict(), made.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert made.save_checkpoint(tmp_path).name == "step-0000000006"


class Renamed(torch.optim.SGD):
    """Changes nothing."""


def test_a_subclass_is_predicted_as_its_base() -> None:
    states = []
    for kind in (torch.optim.SGD, Renamed):
        made = trainer(plan((1, 1)), partial(kind, lr=0.1, momentum=0.9), staleness=2,
                       weight_mode="pipeoptim")  # fmt: skip
        for step, rows in enumerate(ROWS):
            made.step(batch(rows, step))
        states.append(made.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    "options",
    [
        {"staleness": "two"}, {"staleness": 1.5}, {"staleness": None}, {"warm_up": -1},
        {"warm_up": "x"}, {"patience": "long"}, {"weight_mode": ["stash"]}, {"scheduler": 3},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FxpartError) as raised:
        trainer(plan((1, 1)), SGD, **options)
    assert raised.value.code == "FXP109"


def test_instances_mean_themselves() -> None:
    """Groups, scheduler and state are those of plain PyTorch; an instance of others is refused."""
    net, plain_net = model(), model()
    given, own = (
        torch.optim.Adagrad([
            {"params": [p for n, p in m.named_parameters() if "layers" in n], "lr": 0.05},
            {"params": [p for n, p in m.named_parameters() if "tables" in n]},
        ], lr=0.1)
        for m in (net, plain_net)
    )  # fmt: skip
    compiled = fxpart.compile(
        net, plan((2, 1)).cluster, plan=plan((2, 1)), example_inputs=batch(),
        loss=nn.functional.cross_entropy,
    )  # fmt: skip
    made = compiled.trainer(given, routing="queue")
    schedulers = [lr_scheduler.ExponentialLR(each, 0.5) for each in (given, own)]
    for step, rows in enumerate(ROWS):
        x, ids, y = batch(rows, step)
        own.zero_grad()
        nn.functional.cross_entropy(plain_net(x, ids), y).backward()
        own.step()
        made.step((x, ids, y))
        for scheduler in schedulers:
            scheduler.step()
    same(made.state_dict(), {n: t.detach() for n, t in plain_net.state_dict().items()})
    assert torch.equal(made.state_dict()["head.weight"], net.head.weight)  # in no group
    with pytest.raises(FxpartError) as raised:
        compiled.trainer(torch.optim.SGD(model().parameters(), lr=0.1), routing="queue")
    assert raised.value.code == "FXP115"


def test_changes_of_the_module_are_refused() -> None:
    for change in (
        lambda net: net.head.requires_grad_(False),
        lambda net: net.head.weight.data.zero_(),
    ):
        net = model()
        made = fxpart.compile(
            net, plan((1, 1)).cluster, plan=plan((1, 1)), example_inputs=batch(),
            loss=nn.functional.cross_entropy,
        ).trainer(SGD, routing="queue", staleness=2)  # fmt: skip
        made.step(batch(12, 0))
        change(net)
        with pytest.raises(FxpartError) as raised:
            made.step(batch(12, 1))
        assert raised.value.code in ("FXP109", "FXP113")


def test_an_optimizer_whose_step_needs_the_loss() -> None:
    with pytest.raises(FxpartError) as raised:
        trainer(plan((1, 1)), torch.optim.LBFGS)
    assert raised.value.code in ("FXP109", "FXP115")  # its tables have sparse gradients, too
