"""Models that return their loss among other outputs, where compile() is given none."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fxpart
from fxpart.errors import FxpartError


@dataclass
class Result:
    scores: torch.Tensor
    objective: torch.Tensor


Named = namedtuple("Named", ["scores", "total"])
Form = Callable[[torch.Tensor, torch.Tensor], Any]


class Model(nn.Module):
    """form: what is returned, of scores and loss."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.inner, self.outer, self.form = nn.Linear(4, 8), nn.Linear(8, 1), form
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.outer(torch.relu(self.inner(x)))
        return self.form(scores, nn.functional.mse_loss(scores, y))


FOUND: dict[str, tuple[Form, Callable[[Any], torch.Tensor]]] = {
    "loss first": (lambda s, v: (v, s), lambda out: out[0]),
    "nested": (lambda s, v: (s, [2 * s, (v,)]), lambda out: out[1][1][0]),
    "another key": (lambda s, v: {"scores": s, "total_loss": v}, lambda out: out["total_loss"]),
    "dataclass": (lambda s, v: Result(s, v), lambda out: out.objective),
    "named tuple": (lambda s, v: Named(s, v), lambda out: out.total),
    "alone": (lambda s, v: v, lambda out: out),
    "with a metric": (lambda s, v: (s, v, v.detach().sqrt()), lambda out: out[1]),
    "with a count": (lambda s, v: (s, v, torch.tensor(3)), lambda out: out[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_the_only_scalar_with_a_gradient_is_the_loss(name: str) -> None:
    form, take = FOUND[name]
    torch.manual_seed(0)
    model = Model(form)
    plain = copy.deepcopy(model)
    batches = [{"x": torch.randn(8, 4), "y": torch.randn(8, 1)} for _ in range(2)]
    program = fxpart.compile(model, "local:1", example_kwargs=batches[0], microbatches=1)
    assert program.captured.loss_kind == "output"
    trainer = program.trainer(lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss = take(plain(**batch))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(batch), loss.detach())
    torch.testing.assert_close(trainer.state_dict(), dict(plain.state_dict()))


AMBIGUOUS: dict[str, tuple[Form, list[str]]] = {
    "tuple": (lambda s, v: (s, v, 2 * v), ["loss=lambda out: out[1]", "loss=lambda out: out[2]"]),
    "dicts": (
        lambda s, v: {"losses": {"a": v, "b": 2 * v}},
        ["loss=lambda out: out['losses']['a']", "loss=lambda out: out['losses']['b']"],
    ),
    "dataclass": (
        lambda s, v: Result(s.sum(), v),
        ["loss=lambda out: out.scores", "loss=lambda out: out.objective"],
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_several_scalars_are_refused_with_a_choice(name: str) -> None:
    form, choices = AMBIGUOUS[name]
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 1)}
    with pytest.raises(FxpartError, match="FXP106") as found:
        fxpart.compile(Model(form), "local:1", example_kwargs=batch)
    assert all(choice in str(found.value) for choice in choices)


def test_a_scalar_that_no_input_reaches_is_no_loss() -> None:
    class Scaled(Model):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return self.outer(torch.relu(self.inner(x))), self.temperature.exp()

    with pytest.raises(FxpartError, match=r"(?s)FXP106.*does not depend on the inputs"):
        fxpart.compile(Scaled(lambda s, v: s), "local:1", example_inputs=(torch.randn(8, 4),))


@pytest.mark.slow
def test_a_given_loss_has_precedence() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 1)}
    program = fxpart.compile(
        Model(lambda s, v: (s, v, 2 * v)), "local:1", example_kwargs=batch,
        loss=lambda out: out[2],
    )  # fmt: skip
    assert program.captured.loss_kind == "given"


@pytest.mark.slow
def test_an_empty_loss_field_is_not_replaced_by_part_of_a_loss() -> None:
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 1)}
    model = Model(lambda s, v: {"scores": s, "aux_loss": v, "loss": None})
    program = fxpart.compile(model, "local:1", example_kwargs=batch)
    with pytest.raises(FxpartError, match="FXP106"):
        program.trainer(torch.optim.SGD)
