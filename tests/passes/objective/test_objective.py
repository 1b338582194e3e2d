"""The loss of the batch is the loss of the batch, in however many microbatches it comes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_models import (
    COUPLED,
    LOSSES,
    Language,
    Loss,
    batches,
    difference,
    model,
    plainly,
    program_difference,
    sgd,
)
from torch import nn
from torch.nn import functional as F

import fxpart
from fxpart.rng import microbatch_key
from fxpart.training.trainer_factory import load_trainer
from fxpart.verification.single_process import keyed_random

pytestmark = pytest.mark.slow

LAYOUTS = {
    "pipeline": {"mesh": "none", "stages": 2},
    "replicas": {"mesh": "dp=2", "stages": 1},
    "both": {"mesh": "dp=2", "stages": 2},
}


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_and_replicas_have_the_loss_of_the_batch(name: str) -> None:
    data, given, loss = batches(8), model(), LOSSES[name]
    program = fxpart.compile(
        given, "local:4", example_inputs=data[0], loss=loss, microbatches=4,
        constraints=LAYOUTS["pipeline"],
    )  # fmt: skip
    for layout, count in (("pipeline", 4), ("replicas", 2), ("both", 4)):
        planned = program
        if layout != "pipeline":
            planned = program.replan("local:4", microbatches=count, constraints=LAYOUTS[layout])
        found = program_difference(planned, given, loss, data)
        assert found < 1e-12, (layout, found)


def of_one_size(loss: Loss) -> Loss:
    """The loss, which loops over its rows: a graph that takes one size only."""

    def fixed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for _ in range(len(labels)):
            pass
        return loss(scores, labels)

    return fixed


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["two_masks", "class_weights", "focal", "by_size"])
def test_graphs_of_one_size_have_the_loss_of_the_batch(name: str, rows: int) -> None:
    """Microbatches of one row, whose dims look like dims that are broadcast, and of two."""
    data = batches(4)
    loss = of_one_size(LOSSES[name])
    found = difference(loss, data, microbatches=4 // rows, constraints=LAYOUTS["pipeline"])
    assert found < 1e-12


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_rows_of_one_size(name: str, rows: int) -> None:
    data, loss = batches(4), of_one_size(COUPLED[name])
    with pytest.raises(fxpart.FxpartError) as refused:
        difference(loss, data, microbatches=4 // rows, constraints=LAYOUTS["pipeline"])
    assert refused.value.code == "FXP114"
    assert "the loss" in str(refused.value)
    assert difference(loss, data, constraints=LAYOUTS["pipeline"]) < 1e-12


def test_a_loss_of_more_rows_than_a_microbatch_has() -> None:
    """The planner's own number of microbatches is then one."""

    def hardest(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = torch.nn.functional.cross_entropy(scores.mT, labels.clamp(0), reduction="none")
        return each.mean(1).topk(3).values.mean()

    data = batches(4)
    assert difference(hardest, data, constraints=LAYOUTS["pipeline"]) < 1e-12
    with pytest.raises(fxpart.FxpartError, match="use fewer microbatches"):
        difference(hardest, data, microbatches=4, constraints=LAYOUTS["pipeline"])


def test_a_graph_of_one_size_takes_larger_batches_in_pieces_only() -> None:
    """In several microbatches; a program of one would compute the objective of each piece."""
    data = [*batches(4, 1), *batches(8, 1)]
    loss = of_one_size(LOSSES["by_size"])
    assert difference(loss, data, microbatches=2, constraints=LAYOUTS["pipeline"]) < 1e-12
    with pytest.raises(fxpart.FxpartError, match="for one microbatch") as refused:
        difference(loss, data, microbatches=1, constraints=LAYOUTS["pipeline"])
    assert refused.value.code == "FXP105"


@settings(max_examples=12, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(LOSSES)), min_size=1, max_size=3),
    microbatches=st.integers(2, 5),
    rows=st.integers(5, 9),
    seed=st.integers(0, 1000),
)
def test_sums_of_losses(names: list[str], microbatches: int, rows: int, seed: int) -> None:
    """Several losses with different normalizers, microbatches of unequal rows."""

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = [LOSSES[name](scores, labels) / (n + 1) for n, name in enumerate(names)]
        return torch.stack(parts).sum()

    found = difference(
        loss, batches(rows, seed=seed), seed=seed, microbatches=microbatches,
        constraints=LAYOUTS["pipeline"],
    )  # fmt: skip
    assert found < 1e-11, (names, found)


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_rows_are_one_microbatch(name: str) -> None:
    data = batches(6)
    with pytest.raises(fxpart.FxpartError) as refused:
        difference(COUPLED[name], data, microbatches=3, constraints=LAYOUTS["pipeline"])
    assert refused.value.code == "FXP114"
    assert difference(COUPLED[name], data, constraints=LAYOUTS["pipeline"]) < 1e-12


def test_one_microbatch_on_a_pipeline_has_every_bit() -> None:
    for name in ("smoothed", "class_weights", "two_masks"):
        data = batches(8)
        assert (
            difference(LOSSES[name], data, microbatches=1, constraints=LAYOUTS["pipeline"]) == 0.0
        )


def test_a_mean_over_rows_takes_no_totals() -> None:
    (x, y), *_ = batches(8)

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(scores, F.one_hot(labels, scores.shape[-1]).to(scores.dtype))

    program = fxpart.compile(
        model(), "local:2", example_inputs=(x, y), loss=loss, microbatches=4,
        constraints=LAYOUTS["pipeline"],
    )  # fmt: skip
    assert program.spec.totals is None


ONE_NUMBER = ("masked_pixels", "sample_weights", "focal", "class_weights", "smoothed", "likelihood")


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_accumulated_batches_weigh_what_their_losses_are_divided_by(name: str) -> None:
    """Batches with unequal numbers of tokens give the update and the loss of one of all rows."""
    data = [*batches(8, 2), *batches(4, 1, seed=3)]
    whole = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
    (expected,), trained = plainly(model(), LOSSES[name], [whole])  # type: ignore[list-item]
    program = fxpart.compile(
        model(), "local:4", example_inputs=data[0], loss=LOSSES[name], microbatches=1,
        constraints=LAYOUTS["pipeline"],
    )  # fmt: skip
    for layout, count in (("pipeline", 1), ("pipeline", 3), ("replicas", 2)):
        planned = program.replan("local:4", microbatches=count, constraints=LAYOUTS[layout])
        trainer = planned.trainer(sgd)
        fitted = trainer.fit(data, accumulate=3)
        state = trainer.state_dict()
        trainer.close()
        assert fitted.loss == pytest.approx(expected, abs=1e-12)
        for key, value in trained.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)


def test_accumulated_losses_with_several_divisors_weigh_their_rows() -> None:
    data = [*batches(6, 1), *batches(2, 1, seed=3)]
    given = model()
    trained, total = copy.deepcopy(given), 0.0
    for inputs, labels in data:
        part = LOSSES["two_masks"](trained(inputs), labels) * len(inputs) / 8
        part.backward()
        total += part.item()
    sgd(trained.parameters()).step()
    program = fxpart.compile(
        given, "local:2", example_inputs=data[0], loss=LOSSES["two_masks"], microbatches=2,
        constraints=LAYOUTS["pipeline"],
    )  # fmt: skip
    assert program.spec.weight is None
    trainer = program.trainer(sgd)
    assert trainer.fit(data, accumulate=2).loss == pytest.approx(total, abs=1e-12)
    state = trainer.state_dict()
    trainer.close()
    for key, value in trained.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)


def norms(width: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def test_batch_statistics_are_those_of_the_batch() -> None:
    data = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    given = norms()
    losses, trained = plainly(given, F.mse_loss, data)
    program = fxpart.compile(
        given, "local:2", example_inputs=data[0], loss=F.mse_loss,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    assert program.plan.microbatches == 1
    assert program.plan.equivalence is not None
    assert program.plan.equivalence.promise == "bitwise"
    trainer = program.trainer(sgd)
    assert [trainer.step(batch).item() for batch in data] == losses
    state = trainer.state_dict()
    trainer.close()
    assert all(torch.equal(state[name], value) for name, value in trained.state_dict().items())


def test_accepted_coupling_is_recorded_and_warned_of() -> None:
    data = (torch.randn(8, 4), torch.randn(8, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = fxpart.compile(
            norms(), "local:2", example_inputs=data, loss=F.mse_loss, microbatches=4,
            constraints={"mesh": "none", "stages": 2}, batch_coupling="per-microbatch",
        )  # fmt: skip
    assert sum("FXP114" in str(each.message) for each in caught) == 1
    assert program.plan.equivalence is not None
    assert program.plan.equivalence.promise == "per microbatch"
    assert program.plan.equivalence.reasons == ("BatchNorm in 1",)


def test_many_layers_are_one_reason() -> None:
    data = (torch.randn(8, 4), torch.randn(8, 4))
    deep = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5)), nn.Linear(4, 4))
    with pytest.raises(fxpart.FxpartError) as refused:
        fxpart.compile(deep, "local:2", example_inputs=data, loss=F.mse_loss, microbatches=4)
    (problem,) = refused.value.problems
    assert problem.where == "BatchNorm in 0, 1, 2 and 2 more"


def test_statistics_that_are_frozen_couple_nothing() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = norms()
            self.body[1].eval()

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.body[1].eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    data = (torch.randn(8, 4), torch.randn(8, 2))
    program = fxpart.compile(
        Frozen(), "local:2", example_inputs=data, loss=F.mse_loss, microbatches=4,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    assert program.plan.microbatches == 4


def test_an_exported_program_divides_by_the_totals_of_the_batch(tmp_path: Path) -> None:
    data = batches(8)
    given = Language()
    losses, trained = plainly(given, LOSSES["class_weights"], data)
    program = fxpart.compile(
        given, "local:2", example_inputs=data[0], loss=LOSSES["class_weights"], microbatches=4,
        constraints=LAYOUTS["pipeline"],
    )  # fmt: skip
    program.export(tmp_path / "program")
    trainer = load_trainer(tmp_path / "program", sgd, weights=dict(given.state_dict()))
    found = [trainer.step(batch).item() for batch in data]
    state = trainer.state_dict()
    trainer.close()
    assert found == pytest.approx(losses, rel=1e-5)
    assert max((state[n] - t).abs().max().item() for n, t in trained.state_dict().items()) < 1e-6


class Drawn(nn.Module):
    """Noise of several kinds, each element or row on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.outer = nn.Linear(4, 5), nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.inner(x)
        chosen = torch.multinomial(scores.softmax(-1), 1).squeeze(-1)
        soft = F.gumbel_softmax(scores) @ self.table.weight + self.table(chosen)
        keep = soft.new_empty(x.shape[0], 1).bernoulli_(0.5)
        noise = torch.normal(0.0, 0.1, (x.shape[0], 4)) + torch.poisson(x.abs()) * 0.1
        return self.outer(soft * keep + noise)


def test_random_numbers_of_rows_couple_no_rows() -> None:
    torch.manual_seed(0)
    model, data = Drawn(), (torch.randn(8, 4), torch.randn(8, 2))
    twin = copy.deepcopy(model)
    program = fxpart.compile(
        model, "local:2", example_inputs=data, loss=nn.MSELoss(), microbatches=2, check="off",
        constraints={"mesh": "tp=2", "stages": 1},
    )  # fmt: skip
    trainer = program.trainer(sgd)
    trainer.step(data)
    for index, (x, y) in enumerate(zip(data[0].chunk(2), data[1].chunk(2), strict=True)):
        with keyed_random(microbatch_key(0, 0, index)):
            (F.mse_loss(twin(x), y) / 2).backward()
    sgd(twin.parameters()).step()
    for name, tensor in trainer.state_dict().items():
        assert torch.allclose(tensor, twin.state_dict()[name], atol=1e-6), name
