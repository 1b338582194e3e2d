"""An optimizer instance given to an asynchronous trainer, and changes of the user's module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool
from torch import nn
from torch.optim import lr_scheduler

import fxpart
from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow

LOSS = nn.CrossEntropyLoss()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def batches(count: int = 8) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=draw), torch.randint(4, (8,), generator=draw))
        for _ in range(count)
    ]


def program(net: nn.Module, stages: int = 2, mode: str = "stash") -> fxpart.Program:
    return fxpart.compile(
        net, f"local:{stages}", example_inputs=batches(1)[0], loss=LOSS, mode="async", weights=mode,
        constraints={"stages": stages, "microbatches": 1},
    )  # fmt: skip


def plain_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    LOSS(net(batch[0]), batch[1]).backward()
    optimizer.step()


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups, and one layer in none."""
    first = [p for n, p in net.named_parameters() if n.startswith(("0", "6"))]
    rest = [p for n, p in net.named_parameters() if n.startswith(("2", "8"))]
    return [{"params": first, "lr": 0.01}, {"params": rest, "weight_decay": 0.1}]


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "all": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "groups": lambda net: torch.optim.AdamW(groups(net), lr=0.05),
    "subset": lambda net: torch.optim.SGD(net[4].parameters(), lr=0.1, momentum=0.9),
    "reversed": lambda net: torch.optim.Adam(list(net.parameters())[::-1], lr=0.02),
}


@pytest.mark.parametrize("stepped", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_means_itself(kind: str, stepped: int) -> None:
    """Flushed after every minibatch a stream is plain PyTorch: groups, subset, state, schedule."""
    net = model()
    given = KINDS[kind](net)
    for batch in batches(stepped):
        plain_step(net, given, batch)
    oracle = copy.deepcopy(net)
    own = KINDS[kind](oracle)
    own.load_state_dict(given.state_dict())
    trainer = program(net).trainer(given, warm_up=100)
    schedulers = [lr_scheduler.StepLR(each, 2, 0.3) for each in (given, own)]
    for batch in batches():
        plain_step(oracle, own, batch)
        trainer.step(batch)
        for scheduler in schedulers:
            scheduler.step()
    for name, value in trainer.state_dict().items():
        torch.testing.assert_close(value, oracle.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["instance", "trainer.optimizer", "option"])
def test_rates_of_an_instance_count_by_update(where: str) -> None:
    net = model()
    given = torch.optim.SGD(net.parameters(), lr=0.1)
    make = lambda o: lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731
    trainer = program(net, 4).trainer(given, **({"scheduler": make} if where == "option" else {}))
    rates: list[list[float]] = []
    for each in trainer.optimizers.by_place.values():
        mine: list[float] = []
        rates.append(mine)
        each.register_step_pre_hook(lambda o, a, k, mine=mine: mine.append(o.param_groups[0]["lr"]))
    scheduler = None
    if where != "option":
        scheduler = make(given if where == "instance" else trainer.optimizer)
    for batch in batches():
        trainer.step(batch)
        if scheduler is not None:
            scheduler.step()
    trainer.drain()  # type: ignore[union-attr]
    assert rates == [[0.1 * 0.5**n for n in range(8)]] * 4


def test_what_an_instance_cannot_be() -> None:
    net = model()
    stray = torch.optim.SGD(net.parameters(), lr=0.1)
    for given in (
        torch.optim.SGD(model().parameters(), lr=0.1),
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
    ):
        with pytest.raises(FxpartError) as raised:
            program(net).trainer(given)
        assert raised.value.code == "FXP115"
    with pytest.raises(FxpartError) as raised:
        program(net).trainer(
            torch.optim.SGD, scheduler=lambda _: lr_scheduler.ExponentialLR(stray, 0.5)
        )
    assert raised.value.code == "FXP115"


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "frozen": lambda net: net[0].requires_grad_(False),
    "written": lambda net: net[8].weight.detach().mul_(2),
    "data": lambda net: net[2].weight.data.zero_(),
    "replaced": lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(8, 8))),
}


def changed(name: str, stages: int, rank: int) -> str:
    """The code of a change in the middle of a stream; rank: that makes it, -1: all."""
    net = model()
    trainer = program(net, stages).trainer(torch.optim.SGD)
    try:
        for call, batch in enumerate(batches()):
            if call == 4 and rank in (-1, trainer.rank):
                CHANGES[name](net)
            trainer.step(batch)
            assert call < 4 or rank not in (-1, trainer.rank), "the next call refuses it"
    except FxpartError as failure:
        return failure.code
    finally:
        trainer.close()
    return ""


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_in_a_stream_are_refused(name: str) -> None:
    assert changed(name, 4, -1) in ("FXP109", "FXP113")


@pytest.mark.parametrize("name", ["frozen", "written"])
def test_ranks_refuse_them_together(name: str, pool: Pool) -> None:
    found = pool.run(changed, name, 2, -1, ranks=2, timeout=120.0)
    assert found[0] == found[1] and found[0] in ("FXP109", "FXP113")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_change_on_one_rank_reaches_all(rank: int, pool: Pool) -> None:
    """The others hear that its stream has ended, and why."""
    found = pool.run(changed, "frozen", 2, rank, ranks=2, timeout=60.0)
    assert all(code.startswith("FXP") and code < "FXP9" for code in found), found
