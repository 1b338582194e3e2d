"""An optimizer for tables, another for the rest: by names, in every trainer, in checkpoints."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from sparse_models import batch, model, program

from fxpart.compat.multi_optimizer import MultiOptimizer, members
from fxpart.compat.optimizer_choice import choose, state_bytes
from fxpart.errors import FxpartError

BOTH: dict[str, Any] = {
    "*.weight": partial(torch.optim.SparseAdam, lr=0.05),
    "*": partial(torch.optim.AdamW, lr=0.02),
}
CUTS = (("input:*", "dp:S(0)"), ("bags.weight", "dp:S(0)"), ("ids.weight", "dp:S(0)"))


def one_process(seeds: range) -> Any:
    """Two of torch's optimizers, stepped by hand."""
    made = model(trained=True, dtype=torch.float64)
    tables = [p for n, p in made.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in made.named_parameters() if not n.endswith("weight")]
    both = BOTH["*.weight"](tables), BOTH["*"](rest)
    for seed in seeds:
        given = batch(seed, dtype=torch.float64)
        for part in zip(*(t.chunk(4) for t in given.values()), strict=True):
            loss = made(**dict(zip(given, part, strict=True)))["loss"]
            loss.backward(torch.full_like(loss, 0.25))
        for each in both:
            each.step()
            each.zero_grad()
    return made


def compiled(ranks: int, cuts: Any = (), **constraints: Any) -> Any:
    return program(
        "sgd", ranks, cuts, tuple(constraints.items()), trained=True, dtype=torch.float64
    )


WAYS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "stages": {"ranks": 2, "stages": 2},
    "data": {"ranks": 2, "mesh": "dp=2", "stages": 1},
    "zero": {"ranks": 2, "mesh": "dp=2", "stages": 1, "zero": 2},
    "rows sent": {"ranks": 2, "cuts": CUTS, "mesh": "dp=2", "stages": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_trains_and_goes_on_like_one_process(way: str) -> None:
    """In the middle all state moves to another trainer by its original names."""
    made = compiled(**WAYS[way])
    first, second = (made.trainer(optimizer=BOTH) for _ in range(2))
    for seed in range(2):
        first.step(batch(seed, dtype=torch.float64))
    saved = first.optimizer_state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [
        ["bags.weight", "ids.weight"], ["first", "second"]
    ]  # fmt: skip
    assert tuple(saved["state"]["bags.weight"]["exp_avg"].shape) == (22, 4)
    second.load_state_dict(first.state_dict())
    second.load_optimizer_state_dict(saved)
    for trainer in (first, second):
        for seed in range(2, 4):
            trainer.step(batch(seed, dtype=torch.float64))
        want = one_process(range(4))
        for name, tensor in trainer.state_dict().items():
            torch.testing.assert_close(tensor, want.get_parameter(name), rtol=1e-9, atol=1e-12)
        trainer.close()


@pytest.mark.slow
def test_verify_takes_it() -> None:
    assert compiled(**WAYS["data"]).verify(optimizer=BOTH).passed


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stages"])
def test_an_asynchronous_trainer(way: str) -> None:
    trainer = compiled(**WAYS[way]).trainer(optimizer=BOTH, weight_mode="stash")
    losses = []
    for seed in range(30):
        trainer.step(batch(seed % 3, dtype=torch.float64))
        losses += [float(x) for x in trainer.drain()] if seed in (2, 29) else []
    assert losses[-1] < losses[0]
    assert set(trainer.optimizer_state_dict()["state"]) == {
        "bags.weight", "ids.weight", "first", "second"
    }  # fmt: skip
    trainer.close()


def parameters() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(3, 2)) for n in ("table", "w", "b")}


def both_of(lr: float, of: dict[str, torch.nn.Parameter]) -> MultiOptimizer:
    make: Any = choose({"table": partial(torch.optim.SGD, lr=lr), "*": "adamw"}).make
    made = make(of.items())
    assert isinstance(made, MultiOptimizer)
    return made


def test_it_is_one_optimizer_to_everybody_else() -> None:
    made = parameters()
    both = both_of(1.0, made)
    scheduler = torch.optim.lr_scheduler.StepLR(both, 1, gamma=0.5)
    for p in made.values():
        p.grad = torch.ones_like(p)
    before = made["table"].detach().clone()
    both.step()
    assert torch.equal(made["table"], before - 1)
    scheduler.step()
    both.step()
    torch.testing.assert_close(made["table"].detach(), before - 1.5)
    assert set(both.state) == {made["w"], made["b"]}
    other = both_of(9.0, parameters())
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    assert [g["lr"] for g in other.param_groups] == [0.5, 0.0005]
    assert [g["lr"] for one in other.each for g in one.param_groups] == [0.5, 0.0005]
    assert len(other.each[1].state) == 2
    assert both.zero_grad() is None and made["w"].grad is None


def test_every_name_needs_a_pattern_and_every_pattern_a_name() -> None:
    assert members(["t*", "*"], ["table", "w", "tail"]) == [["table", "tail"], ["w"]]
    with pytest.raises(FxpartError) as caught:
        members(["x*", "t*"], ["table", "w"])
    assert [p.where for p in caught.value.problems] == ["optimizer['x*']", "optimizer"]
    with pytest.raises(FxpartError, match="FXP109"):
        choose({})


def test_state_is_counted_by_the_real_classes() -> None:
    shapes = [((8, 4), torch.float32), ((6,), torch.float32), ((5, 4), torch.float32)]
    names = ["a.table", "bias", "b.table"]
    choice = choose({"*.table": torch.optim.SparseAdam, "*": torch.optim.SGD})
    assert state_bytes(choice, shapes, names) == [2 * 8 * 4 * 4, 0, 2 * 5 * 4 * 4]
    assert state_bytes(choose("adagrad"), shapes[:1]) == [8 * 4 * 4 + 4]
