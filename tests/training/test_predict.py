"""Compiled programs predict, in the structure that the model returns, and train adapters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxpart
from fxpart.capture.model_outputs import form_of, named_tensors
from fxpart.errors import FxpartError


class Pair(NamedTuple):
    mean: torch.Tensor
    parts: list[torch.Tensor]


@dataclass
class Rich:
    loss: torch.Tensor | None
    logits: torch.Tensor
    name: str = "rich"


class Model(nn.Module):
    """Three layers with dropout. kind: what it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = []
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
            hidden.append(x)
        logits = self.head(x)
        if self.kind == "tensor":
            return logits
        if self.kind == "pair":
            return Pair(logits.square().mean(), [logits, hidden[0]])
        if self.kind == "rich":
            assert labels is not None
            return Rich(nn.functional.cross_entropy(logits, labels), logits)
        return {"logits": logits, "hidden": (hidden[0], hidden[2]), "count": 3}


def program(kind: str, **options: Any) -> tuple[Model, fxpart.Program]:
    """The model on three stages; its loss is its own, or cross entropy, or none."""
    torch.manual_seed(0)
    model = Model(kind)
    x, labels = torch.randn(8, 6), torch.arange(8) % 4
    given: dict[str, Any] = {"example_inputs": (x, labels)}
    if kind != "rich":
        given = {"example_inputs": (x,)}
    if kind == "tensor":
        given = {"example_inputs": (x, labels), "loss": nn.functional.cross_entropy}
    chosen = {"constraints": {"stages": 3, "mesh": "none"}, "microbatches": 4, **options}
    return model, fxpart.compile(model, "local:4", **given, **chosen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pair", "rich", "dict"])
def test_the_models_own_structure(kind: str) -> None:
    model, made = program(kind)
    trainer = made.trainer("sgd", need_loss=False)
    model.eval()
    for rows in (8, 3, 1):
        x = torch.randn(rows, 6)
        labels = torch.zeros(rows, dtype=torch.long)
        with torch.no_grad():
            expected = model(x, labels) if kind == "rich" else model(x)
        found = trainer.predict((x,))  # no labels, also where training needs them
        assert type(found) is type(expected)
        wanted, got = named_tensors(expected), named_tensors(found)
        wanted.pop("loss", None)
        if kind == "pair":
            wanted.pop("mean")  # the only scalar with a gradient, and so the loss
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)
    if kind == "dict":
        assert found["count"] == 3 and isinstance(found["hidden"], tuple)
    if kind == "rich":
        assert found.loss is None and found.name == "rich"


@pytest.mark.slow
def test_predictions_see_what_was_trained() -> None:
    model, made = program("tensor")
    trainer = made.trainer("sgd")
    x, labels = torch.randn(8, 6), torch.arange(8) % 4
    before = trainer.predict((x,))
    trainer.step((x, labels))
    after = trainer.predict((x,))
    model.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(after, model.eval()(x), rtol=1e-6, atol=1e-7)
    assert not torch.equal(before, after)
    accuracy = trainer.evaluate(
        [(x, labels)], {"right": lambda out, given: (out.argmax(-1) == given[1]).float().mean()}
    )
    assert accuracy["right"] == pytest.approx(float((after.argmax(-1) == labels).float().mean()))


@pytest.mark.slow
def test_several_stages_on_a_rank_and_a_loss_that_broadcasts() -> None:
    """torch.export takes mse_loss's broadcast for the output: it needs no targets all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(6, 6), nn.Tanh())])
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    made = fxpart.compile(
        model, "local:2", example_inputs=(x, y), loss=nn.functional.mse_loss, microbatches=4,
        constraints={"schedule": "interleaved", "granularity": "op", "mesh": "none"},
    )  # fmt: skip
    trainer = made.trainer("sgd")
    trainer.step((x, y))
    model.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        expected = model.eval()(x)
    torch.testing.assert_close(trainer.predict((x,)), expected, rtol=1e-6, atol=1e-7)
    found = trainer.evaluate([(x, y)], {"mse": lambda out, given: (out - given[1]).square().mean()})
    assert found["mse"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_lanes_predict_whole_outputs(mesh: str) -> None:
    model, made = program("dict", constraints={"stages": 2, "mesh": mesh})
    trainer = made.trainer("sgd", need_loss=False)
    x = torch.randn(8, 6)
    with torch.no_grad():
        expected = named_tensors(model.eval()(x))
    found = named_tensors(trainer.predict((x,)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        (torch.ones(2), None, 3),
        OrderedDict(a=torch.ones(1), b=[torch.zeros(1), "text"]),
        Pair(torch.ones(1), [torch.zeros(2), torch.zeros(3)]),
        {"output": {"x": torch.ones(1)}, "output_x": torch.zeros(1)},  # names that meet
        (),
    ],
)
def test_forms_give_the_value_again(value: Any) -> None:
    again = form_of(value)(named_tensors(value))
    assert type(again) is type(value)
    assert str(again) == str(value)


class Adapted(nn.Module):
    """A frozen layer with a trainable product of low rank beside it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Frozen layers first, then adapted ones."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(6, 6).requires_grad_(False), nn.Tanh()]
    layers += [Adapted(nn.Linear(6, 6), 2), nn.Tanh(), Adapted(nn.Linear(6, 4), 2)]
    return nn.Sequential(*layers), (torch.randn(8, 6), torch.arange(8) % 4)


def adapters_program() -> tuple[nn.Module, Any, fxpart.Program]:
    model, batch = adapted()
    made = fxpart.compile(
        model, "local:4", example_inputs=batch, loss=nn.functional.cross_entropy, microbatches=2,
        constraints={"stages": 3, "mesh": "none", "granularity": "op"},
    )  # fmt: skip
    return model, batch, made


@pytest.mark.slow
def test_adapters_train_as_in_one_process() -> None:
    """Frozen weights stay, nothing flows back below the first adapter, adapters are saved alone."""
    model, batch, made = adapters_program()
    trainer = made.trainer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), log_grad_norm=True)
    model = copy.deepcopy(model)  # the trainer watches the other one
    mine = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in mine])  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad()
        assert float(trainer.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert float(trainer.last_grad_norm) == pytest.approx(float(norm), rel=1e-5)  # type: ignore[arg-type]
    state = trainer.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
    assert not any(value.requires_grad for value in made.spec.stages[0].outputs)
    small = trainer.state_dict(trainable_only=True)
    assert set(small) == {n for n, p in model.named_parameters() if p.requires_grad}
    again = made.trainer("sgd")
    again.load_state_dict(small, strict=False)
    assert torch.equal(again.predict(batch[:1]), trainer.predict(batch[:1]))


@pytest.mark.slow
def test_what_is_frozen_is_settled_when_compiled() -> None:
    model, _, made = adapters_program()
    model[0].requires_grad_(True)
    with pytest.raises(FxpartError, match=r"0\.weight") as caught:
        made.trainer("sgd")
    assert [p.code for p in caught.value.problems] == ["FXP109"] * 2


def tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def rows_of_tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.transpose(1, 2), labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "mesh", "stages"),
    [(tokens, "none", 1), (tokens, "dp=2", 2), (rows_of_tokens, "dp=2", 1), (tokens, "none", 2)],
)
def test_sizes_of_labels_are_not_needed(loss: Any, mesh: str, stages: int) -> None:
    """The length of labels is a symbol of their own, or one that the inputs have, too."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    batch = torch.randn(8, 6, 4), torch.randint(0, 5, (8, 6))
    trainer = fxpart.compile(
        model, "local:4", example_inputs=batch, loss=loss, microbatches=2,
        constraints={"mesh": mesh, "stages": stages},
    ).trainer("sgd")  # fmt: skip
    with torch.no_grad():
        for x in (batch[0], torch.randn(12, 7, 4)):
            torch.testing.assert_close(trainer.predict((x,)), model(x))
        torch.testing.assert_close(trainer.predict(batch), model(batch[0]))
    trainer.close()


class LabelsFirst(nn.Module):
    """Its first input is one that outputs do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, labels: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.last(self.first(x).tanh()) + torch.zeros(x.shape[0], x.shape[1], 1)
        return {"loss": tokens(scores, labels), "scores": scores}


@pytest.mark.slow
def test_sizes_are_read_from_inputs_that_outputs_need() -> None:
    model = LabelsFirst()
    labels, x = torch.randint(0, 5, (8, 6)), torch.randn(8, 6, 4)
    trainer = fxpart.compile(
        model, "local:4", example_inputs={"labels": labels, "x": x}, microbatches=2,
        constraints={"mesh": "dp=2", "stages": 2},
    ).trainer("sgd")  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(trainer.predict({"x": x})["scores"], model(labels, x)["scores"])
    trainer.close()
