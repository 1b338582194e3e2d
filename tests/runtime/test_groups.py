"""Parameter groups by name, schedulers on every rank, norms and clipping: as one process has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hand_stages import ADAMW, Whole, batch, language
from ranks import Pool
from runtime_programs import bits, make

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer, connect
from fxpart.runtime.optimizer.parameter_groups import assign_groups, no_decay

SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "norm.weight": (3,), "scale": ()}
GROUPS: list[dict[str, Any]] = [
    {"params": ["*.bias", "norm.*"], "weight_decay": 0.0, "name": "plain"},
    {"params": "embed.*", "lr": 0.003},
]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def names(given: Any) -> list[tuple[str, ...]]:
    return [group.names for group in assign_groups(given, SHAPES)]


def test_patterns_and_the_rest() -> None:
    assert names([{"params": "*.bias"}]) == [("a.bias",), ("a.weight", "norm.weight", "scale")]
    assert names([{"lr": 1.0}, {"params": ["*.weight"]}]) == [
        ("a.bias", "scale"), ("a.weight", "norm.weight"),
    ]  # fmt: skip
    assert names([{"params": "*"}]) == [tuple(SHAPES)]


def test_functions() -> None:
    assert names(lambda name: {"lr": 0.5} if name == "scale" else None) == [
        ("a.weight", "a.bias", "norm.weight"), ("scale",),
    ]  # fmt: skip
    groups = assign_groups(no_decay(0.3, skip=["norm*"]), SHAPES)
    assert [(g.label(i), g.options["weight_decay"], g.names) for i, g in enumerate(groups)] == [
        ("decay", 0.3, ("a.weight",)), ("no_decay", 0.0, ("a.bias", "norm.weight", "scale")),
    ]  # fmt: skip


def test_all_faults_at_once() -> None:
    with pytest.raises(FxpartError) as caught:
        assign_groups([{"params": "b.*"}, {"params": "a.*"}, {"params": ["*.bias", "c"]}], SHAPES)
    wrong = [(p.code, p.where) for p in caught.value.problems]
    assert wrong == [
        ("FXP109", "group 0, params 'b.*'"),
        ("FXP109", "group 2, params '*.bias'"),
        ("FXP109", "group 2, params 'c'"),
    ]


@pytest.mark.parametrize("given", [[7], [{}, {}], [{"params": [torch.ones(1)]}], lambda name: 3])
def test_what_is_no_group(given: Any) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        assign_groups(given, SHAPES)


def oracle(optimizer: Any, groups: Any = None, tied: bool = False) -> Whole:
    """One process whose optimizer has torch's own groups."""
    hand = language(tied=tied)

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        return optimizer(parameters)

    whole = Whole(hand, grouped)
    if groups is not None:
        named = {n: p for n, p in whole.named.items() if p.requires_grad}
        found = assign_groups(groups, {n: tuple(p.shape) for n, p in named.items()})
        given = [{**g.options, "params": [named[n] for n in g.names]} for g in found]
        whole.optimizer = optimizer(given)
    return whole


def trainer(cut: tuple[int, ...] = (1, 1, 1, 1), **options: Any) -> Trainer:
    return make(language(cut, tied=False), InProcess(len(cut)), **options)


@pytest.mark.parametrize("groups", [GROUPS, no_decay(0.1)])
def test_groups_are_torchs(groups: Any) -> None:
    whole, parts = oracle(ADAMW, groups), trainer(groups=groups)
    for seed in range(4):
        parts.step(batch(seed=seed))
        whole.step(batch(seed=seed), 4)
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


def grouped_run(cut: tuple[int, ...], saved: Any = None) -> Any:
    """Steps with groups and a scheduler; then the groups by name, and what each rank's are."""
    made = make(language(cut, tied=False), connect(len(cut)), groups=GROUPS, log_grad_norm=True)
    assert made.optimizer is not None
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        made.optimizer, [lambda n: 0.5**n, lambda n: 1.0, lambda n: 1 / (n + 1)]
    )
    losses = []
    for seed in range(3):
        losses.append(made.step(batch(seed=seed)).item())
        scheduler.step()
    rates = [group["lr"] for group in made.optimizer.param_groups]
    state = made.optimizer_state_dict()
    for group in made.optimizer.param_groups:
        group["lr"] = 7.0
    made.load_optimizer_state_dict(state)
    again = [group["lr"] for group in made.optimizer.param_groups]
    groups = [(g["params"], g["lr"], g["weight_decay"]) for g in state["param_groups"]]
    assert made.last_grad_norm is not None
    norms = (made.last_grad_norm.item(), made.last_group_norms)
    return losses, rates, again, groups, norms, bits(made.state_dict())


@pytest.mark.slow
def test_groups_over_gloo(pool: Pool) -> None:
    """Every rank has every group, in the same order, with the same rates, also after loading."""
    cut = (1, 1, 1, 1)
    expected = grouped_run(cut)
    _, rates, again, groups, norms, _ = expected
    assert rates == again == [0.01 * 0.5**3, 0.003, 0.01 / 4]
    assert [names for names, *_ in groups] == [
        ["norm.weight", "mix.bias", "norm.bias"], ["embed.weight"], ["mix.weight", "head.weight"]
    ]  # fmt: skip
    total, by_group = norms
    assert list(by_group) == ["plain", "1", "2"]
    assert sum(n**2 for n in by_group.values()) == pytest.approx(total**2)
    assert pool.run(grouped_run, cut, ranks=4) == [expected] * 4


def wrong_groups() -> list[Any]:
    """A pattern without a parameter, and ranks that disagree about a rate."""
    transport, found = connect(2), []
    rate = 0.1 * (1 + transport.local[0])
    for options in ({"groups": [{"params": "nothing.*"}]}, {"groups": [{"lr": rate}]}):
        try:
            make(language((2, 2)), transport, **options)
        except FxpartError as failure:
            found.append([(p.code, p.where) for p in failure.problems])
    return found


@pytest.mark.slow
def test_wrong_groups_are_one_error_on_every_rank(pool: Pool) -> None:
    expected = [
        [("FXP109", "group 0, params 'nothing.*'")],
        [("FXP501", "the optimizer's parameter groups")],
    ]
    assert pool.run(wrong_groups) == [expected] * 2


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    lrs = torch.optim.lr_scheduler
    first = lrs.LinearLR(optimizer, 0.1, total_iters=4)
    then = lrs.CosineAnnealingLR(optimizer, 16)
    return lrs.SequentialLR(optimizer, [first, then], [4])


LRS = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": partial(LRS.StepLR, step_size=3, gamma=0.7),
    "cosine": partial(LRS.CosineAnnealingWarmRestarts, T_0=5),
    "cycle": partial(LRS.OneCycleLR, max_lr=0.1, total_steps=20),  # moves the momentum, too
    "warmed": warmed,
    "plateau": plateau,
}


def scheduled(name: str, frozen: bool) -> tuple[list[float], Any]:
    """Twenty steps on three stages; the rates after each."""
    hand = language((1, 2, 1), tied=False, frozen=frozen)
    made = make(hand, connect(3), optimizer=SGD, microbatches=2)
    assert made.optimizer is not None
    scheduler, rates = SCHEDULERS[name](made.optimizer), []
    for seed in range(20):
        loss = made.step(batch(4, seed=seed % 3))
        scheduler.step(*((loss,) if name == "plateau" else ()))
        rates.append(made.optimizer.param_groups[0]["lr"])
    return rates, bits(made.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_those_of_one_process(name: str) -> None:
    whole = Whole(language(tied=False), SGD)
    scheduler, rates = SCHEDULERS[name](whole.optimizer), []
    for seed in range(20):
        loss = whole.step(batch(4, seed=seed % 3), 2)
        scheduler.step(*((loss,) if name == "plateau" else ()))
        rates.append(whole.optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    found, state = _in_process(name)
    assert found == rates
    assert bits(whole.state()).items() <= state.items()


def _in_process(name: str) -> tuple[list[float], Any]:
    return scheduled(name, frozen=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cycle", "plateau"])
def test_schedulers_over_gloo(pool: Pool, name: str) -> None:
    """The first stage has no parameter that is trained."""
    expected = scheduled(name, frozen=True)
    assert pool.run(scheduled, name, True, ranks=3) == [expected] * 3


def test_the_norm_is_logged_without_clipping() -> None:
    parts, whole = trainer(log_grad_norm=True), Whole(language(tied=False), ADAMW)
    parts.step(batch())
    whole.backward(batch(), 4)
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.named.values()])  # type: ignore[misc]
    assert parts.last_grad_norm is not None
    assert torch.equal(parts.last_grad_norm, expected)
    whole.update()
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


def test_clipping_by_value() -> None:
    parts, whole = trainer(clip_value=0.002), Whole(language(tied=False), SGD)
    parts = trainer(clip_value=0.002, optimizer=SGD)
    for seed in range(3):
        parts.step(batch(seed=seed))
        whole.backward(batch(seed=seed), 4)
        torch.nn.utils.clip_grad_value_(list(whole.named.values()), 0.002)
        whole.update()
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.0}, {"clip_norm": 1.0, "clip_value": 1.0}, {"clipnorm": 1.0}]
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        trainer(**options)


def test_state_that_lacks_a_parameter_changes_nothing() -> None:
    parts = trainer()
    parts.step(batch())
    state = parts.optimizer_state_dict()
    state["param_groups"][0]["params"].remove("mix.bias")
    state["param_groups"][0]["lr"] = 3.0
    with pytest.raises(FxpartError, match="mix.bias"):
        parts.load_optimizer_state_dict(state)
    assert parts.optimizer is not None and parts.optimizer.param_groups[0]["lr"] == 0.01
