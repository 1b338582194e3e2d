"""What cannot be captured: one error with the user's line and a fix."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import nn

from fxpart.capture import capture, diagnose
from fxpart.errors import FxpartError


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        if y.mean() > 0:  # the line
            y = y * 2
        return y


class Item(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        return y * int(x.abs().max().item())  # the line


class Nonzero(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        chosen = (y.sum(-1) > 0).nonzero()  # the line
        return y + chosen.sum()


class Skips(Branch):
    """What models with layer drop do."""

    layerdrop = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand([])
        if self.training and drawn < self.layerdrop:  # the line
            return x
        return self.lin(x)


def line_of(model: type[nn.Module]) -> str:
    """The marked line of a class's forward, as file:line."""
    code = model.forward.__code__
    number = code.co_firstlineno
    while "# the line" not in linecache.getline(code.co_filename, number):
        number += 1
    return f"test_capture_errors.py:{number}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "codes", "fix"),
    [
        (Branch, {"FXP103"}, "torch.where"),
        (Item, {"FXP103", "FXP108"}, ".item()"),
        (Nonzero, {"FXP103", "FXP108"}, "torch.where"),
        (Skips, {"FXP103"}, "layerdrop"),
    ],
)
def test_data_dependence_names_the_line_and_a_fix(
    model: type[nn.Module], codes: set[str], fix: str
) -> None:
    with pytest.raises(FxpartError) as caught:
        capture(model(), (torch.randn(6, 4),), batch_dims={"x": 0})
    first = caught.value.problems[0]
    assert first.code in codes
    assert line_of(model) in first.where
    assert fix in first.fix
    assert "export, fixed batch" in first.why


def test_layer_drop_is_no_obstacle_in_evaluation() -> None:
    captured = capture(Skips(), (torch.randn(6, 4),), training=False)
    assert captured.method == "export" and captured.symbolic


def test_a_model_that_fails_by_itself_says_so() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x)

    with pytest.raises(FxpartError) as caught:
        capture(Wrong(), (torch.randn(6, 4),))
    problem = caught.value.problems[0]
    assert problem.code == "FXP101" and "itself fails" in problem.why
    assert "test_capture_errors.py" in problem.where


def test_odd_leaves_are_all_named() -> None:
    batch = {"x": torch.randn(6, 4), "a": object(), "b": {"c": [1, {2, 3}]}}
    with pytest.raises(FxpartError) as caught:
        capture(Branch(), batch)
    assert [p.where for p in caught.value.problems] == ["batch['a']", "batch['b']['c'][1]"]
    assert caught.value.code == "FXP109"


def test_no_examples() -> None:
    with pytest.raises(FxpartError) as caught:
        capture(Branch())
    assert caught.value.code == "FXP102" and "example_inputs" in caught.value.problems[0].fix


def test_no_tensor_in_the_examples() -> None:
    with pytest.raises(FxpartError) as caught:
        capture(Branch(), (1, 2))
    assert caught.value.code == "FXP102"


def test_two_dicts() -> None:
    with pytest.raises(FxpartError, match="example_kwargs"):
        capture(Branch(), {"x": torch.randn(2, 4)}, {"y": torch.randn(2, 4)})


def test_no_loss_and_nothing_that_floats() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > 0).sum(-1)

    with pytest.raises(FxpartError) as caught:
        capture(Counts(), (torch.randn(6, 4),))
    assert caught.value.code == "FXP106"


def test_a_loss_that_is_no_number() -> None:
    def vector(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).pow(2).mean(-1)

    with pytest.raises(FxpartError) as caught:
        capture(nn.Linear(4, 4), (torch.randn(6, 4), torch.randn(6, 4)), loss=vector)
    assert caught.value.code == "FXP106" and "[6]" in str(caught.value)


def test_a_loss_that_lacks_targets() -> None:
    with pytest.raises(FxpartError) as caught:
        capture(nn.Linear(4, 4), {"input": torch.randn(6, 4)}, loss=nn.functional.mse_loss)
    assert caught.value.code == "FXP109" and "target" in str(caught.value)


@pytest.mark.slow
def test_diagnosis_carries_the_causes() -> None:
    found = diagnose(Branch(), (torch.randn(6, 4),))
    assert not found.captured and found.model == "Branch" and found.method == ""
    assert found.causes[0].code == "FXP103"
    assert line_of(Branch) in found.causes[0].where


class _Kept(nn.Module):
    """Writes to itself in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.seen: list[Any] = []
        self.last: Any = None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.lin(x)
        self.seen.append(x.shape)
        self.count += 1
        return self.last


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model = _Kept()
    model.lin.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.random.get_rng_state()
    captured = capture(model, (torch.randn(6, 4, generator=torch.Generator()),))
    assert model.last is None and model.seen == []
    assert model.training and not model.lin.training
    assert torch.equal(random, torch.random.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert captured.persistent == {"count"}
    model.eval()
    capture(model, (torch.randn(6, 4),), training=True)
    assert not model.training
