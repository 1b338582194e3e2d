"""An optimizer instance means itself: groups, a subset of the parameters, state and step counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_models import LAYOUTS, batches, difference, perceptron, program, step, twin
from torch import nn

from fxpart.errors import FxpartError

pytestmark = pytest.mark.slow

Make = Callable[[nn.Module], torch.optim.Optimizer]


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    """The head learns faster and is not decayed."""
    return torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "weight_decay": 0.2},
            {"params": [*model[3].parameters(), *model[1].parameters()], "lr": 0.02, "eps": 1e-5},
        ],
        lr=0.003,
    )


def with_frozen(model: nn.Module) -> torch.optim.Optimizer:
    """Frozen parameters are among them, and decay does not touch them."""
    model[1].requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


INSTANCES: dict[str, Make] = {
    "two rates": two_rates,
    "frozen": with_frozen,
    "named": lambda m: torch.optim.Adam(list(m.named_parameters()), lr=0.01, amsgrad=True),
    "tensor rate": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "one at a time": lambda m: torch.optim.RMSprop(m.parameters(), foreach=False, centered=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "biases": lambda m: torch.optim.Adagrad([m[0].bias, m[3].bias], lr=0.1),
    "middle": lambda m: torch.optim.NAdam(m[1].parameters(), lr=0.01),
}


def compare(make: Make, layout: str, before: int) -> None:
    """Steps in plain PyTorch, then in the layout, against plain PyTorch throughout."""
    mine, plain, reference = twin(model := perceptron(), make)
    given = batches(before + 3)
    for batch in given[:before]:
        step(model, mine, batch)
        step(plain, reference, batch)
    mine.zero_grad()
    trainer = program(model, layout, mine).trainer()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for batch in given[before:]:
        trainer.step(batch)
        step(plain, reference, batch)
    state = trainer.state_dict()
    assert difference(state, plain) < 2e-6
    held = {id(p) for group in mine.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held or not parameter.requires_grad:
            assert torch.equal(state[name], start[name]), name
    trainer.close()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_trains_on(name: str, before: int) -> None:
    compare(INSTANCES[name], "stages", before)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "stages"])
@pytest.mark.parametrize("name", ["two rates", "momentum", "tensor rate", "biases"])
def test_state_is_divided_as_parameters_are(name: str, layout: str) -> None:
    compare(INSTANCES[name], layout, 2)


def test_state_of_another_shape_goes_whole_to_a_stage() -> None:
    compare(lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05), "stages", 2)


def test_parameters_of_the_loss_are_the_models() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return ((output - target) * self.scale).square().mean()

    model, loss = perceptron(), Weighted()
    plain, plain_loss = copy.deepcopy(model), copy.deepcopy(loss)
    make = partial(torch.optim.SGD, lr=0.1)
    mine = make([*model[3].parameters(), *loss.parameters()])
    reference = make([*plain[3].parameters(), *plain_loss.parameters()])
    trainer = program(model, "stages", mine, loss=loss).trainer()
    for batch in batches(3):
        trainer.step(batch)
        step(plain, reference, batch, plain_loss)
    state = trainer.state_dict()
    assert torch.allclose(state.pop("loss.scale"), plain_loss.scale, atol=1e-6)
    assert difference(state, plain) < 1e-6


def test_tied_parameters_are_held_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.mix(self.embed(ids))))

    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    given = [(torch.randint(10, (8,)), torch.randint(10, (8,))) for _ in range(4)]
    mine, plain, reference = twin(
        model := Tied(), lambda m: torch.optim.Adam(m.parameters(), lr=0.01)
    )
    step(model, mine, given[0], loss)
    step(plain, reference, given[0], loss)
    trainer = program(model, "stages", mine, loss=loss, example=given[0]).trainer()
    for batch in given[1:]:
        trainer.step(batch)
        step(plain, reference, batch, loss)
    assert difference(trainer.state_dict(), plain) < 1e-6


def test_gathered_state_and_checkpoints_have_the_groups(tmp_path: Any) -> None:
    mine, plain, reference = twin(model := perceptron(), two_rates)
    given = batches(6)
    for batch in given[:2]:
        step(model, mine, batch)
        step(plain, reference, batch)
    trainer = program(model, "zero1", mine).trainer()
    trainer.step(given[2])
    step(plain, reference, given[2])
    found = trainer.optimizer_state_dict()
    rates = [group["lr"] for group in found["param_groups"]]
    assert rates == [0.003, 0.02]
    assert found["param_groups"][1]["params"] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    wanted = reference.state[plain[0].weight]
    assert torch.allclose(found["state"]["0.weight"]["exp_avg"], wanted["exp_avg"], atol=1e-7)
    assert float(found["state"]["3.bias"]["step"]) == 3
    trainer.save_checkpoint(tmp_path)
    again = program(other := perceptron(1), "stages", two_rates(other)).trainer()
    again.load_checkpoint(tmp_path)
    for batch in given[3:]:
        again.step(batch)
        step(plain, reference, batch)
    assert difference(again.state_dict(), plain) < 2e-6


def test_a_checkpoint_of_a_subset(tmp_path: Any) -> None:
    def head(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(m[3].parameters(), lr=0.01)

    mine, plain, reference = twin(model := perceptron(), head)
    trainer, given = program(model, "stages", mine).trainer(), batches(4)
    trainer.step(given[0])
    trainer.save_checkpoint(tmp_path)
    again = program(other := perceptron(), "replicas", head(other)).trainer()
    again.load_checkpoint(tmp_path)
    again.load_optimizer_state_dict(trainer.optimizer_state_dict())
    step(plain, reference, given[0])
    for batch in given[1:]:
        again.step(batch)
        step(plain, reference, batch)
    assert difference(again.state_dict(), plain) < 1e-6


def other_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(copy.deepcopy(model).parameters())


def partly_others(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(1))])


def twice(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(model[0].weight.data)], lr=0.1)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.register_step_post_hook(lambda *_: None)
    return made


def with_own_step(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.step = lambda closure=None: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (other_model, "6 of its 6 parameters do not belong to the model"),
        (partly_others, "1 of its 7 parameters"),
        (twice, "0.weight twice"),
        (hooked, "hooks"),
        (with_own_step, "step method was replaced"),
    ],
)
def test_what_cannot_be_honored_is_refused(make: Make, why: str) -> None:
    model = perceptron()
    with pytest.raises(FxpartError, match=why) as caught:
        program(model, "stages", make(model))
    assert caught.value.code == "FXP115"
    made = program(model, "stages")
    with pytest.raises(FxpartError, match=why):
        made.trainer(make(model))


def test_an_instance_of_an_exported_program_is_refused(tmp_path: Any) -> None:
    from fxpart.training.trainer_factory import load_trainer

    model = perceptron()
    made = program(model, "stages")
    made.export(tmp_path)
    with pytest.raises(FxpartError, match="FXP115"):
        load_trainer(
            tmp_path, torch.optim.SGD(model.parameters(), lr=0.1), weights=model.state_dict()
        )


def test_groups_beside_an_instance_are_refused() -> None:
    mine = torch.optim.SGD((model := perceptron()).parameters(), lr=0.1)
    with pytest.raises(FxpartError, match="its own groups"):
        program(model, "stages").trainer(mine, groups=[{"params": "*.bias", "lr": 1.0}])


def test_an_instance_is_its_own_again_when_the_trainer_is_closed() -> None:
    mine = torch.optim.SGD((model := perceptron()).parameters(), lr=0.1)
    trainer = program(model, "stages", mine).trainer()
    for call in (mine.state_dict, lambda: mine.add_param_group({"params": []})):
        with pytest.raises(FxpartError, match="FXP115"):
            call()
    trainer.step(batches(1)[0])
    trainer.close()
    before = model[0].weight.detach().clone()
    step(model, mine, batches(1)[0])
    assert not torch.equal(before, model[0].weight)
    assert copy.deepcopy(mine).state_dict()["param_groups"][0]["lr"] == 0.1


def test_verify_compares_with_the_instance() -> None:
    model = perceptron()
    found = program(model, "stages", two_rates(model)).verify(steps=2)
    assert found.passed and found.largest < 1e-5
