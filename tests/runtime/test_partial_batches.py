"""Batches smaller than the compiled one, of any size down to one row: the results of that batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from partial_batch_programs import (
    HIDDEN,
    Plain,
    Tagger,
    dense,
    dense_batch,
    refused,
    seeded,
    sgd,
    tagger_batch,
    train_and_evaluate,
    trainer,
)
from ranks import Pool
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.runtime.batch.row_repetition import count_repeats, split_rows

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"mesh": "none", "stages": 2},
    "dp 2": {"mesh": "dp=2", "stages": 1},
    "dp 4, ZeRO 3": {"mesh": "dp=4", "zero": 3},
    "dp 3": {"mesh": "dp=3", "stages": 1},
    "dp 2 x tp 2, ZeRO 1": {"mesh": "dp=2,tp=2", "zero": 1},
    "dp 2, two stages, ZeRO 2": {"mesh": "dp=2", "stages": 2, "zero": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_evaluation_are_those_of_the_smaller_batch(layout: str) -> None:
    """From more rows than were compiled for down to one: losses, weights and outputs."""
    found = train_and_evaluate(LAYOUTS[layout], (12, 5, 7, 24, 1, 2, 13))
    assert found.pop("shapes")
    assert max(found.values()) < 2e-6, found


@pytest.mark.slow
def test_every_rank_over_gloo(pool: Pool) -> None:
    for found in pool.run(train_and_evaluate, {"mesh": "dp=2"}, (8, 3, 1), ranks=2):
        assert found.pop("shapes")
        assert max(found.values()) < 2e-6, found


@pytest.mark.slow
def test_every_rank_refuses_over_gloo(pool: Pool) -> None:
    assert pool.run(refused, 3, ranks=2) == [["FXP114"] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_dropout_draws_what_one_rank_draws(rows: int) -> None:
    """Masks are repeated with their rows, so that each row has one mask."""
    model = seeded(lambda: nn.Sequential(dense(), nn.Dropout(0.4), nn.Linear(3, 3)))
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    deep = seeded(lambda: nn.Sequential(nn.Embedding(11, 8), copy.deepcopy(layer), nn.Linear(8, 1)))
    tokens = [tagger_batch(count)[0] for count in (8, rows, 8)]
    for made, batches in (
        (model, [dense_batch(count) for count in (8, rows, 8)]),
        (deep, [(t, t.unsqueeze(-1).float() / 11) for t in tokens]),
    ):
        states = []
        for constraints in ({"mesh": "none", "stages": 1}, {"mesh": "dp=4"}):
            trained = trainer(made, batches[0], nn.MSELoss(), constraints, microbatches=1)
            for batch in batches:
                trained.step(batch)
            states.append(trained.state_dict())
        for name, value in states[0].items():
            assert torch.allclose(states[1][name], value, atol=1e-6), name


class Normalized(nn.Module):
    """BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.relu(self.norm(self.before(x))))


def spread(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean, and the variance of all outputs, which depends on how many rows there are."""
    return nn.functional.mse_loss(found, target) + 0.1 * found.var()


COUPLED: dict[str, Any] = {
    "sum": (dense, nn.MSELoss(reduction="sum")),
    "variance": (dense, spread),
    "penalty of the sum": (dense, lambda o, t: (o - t).abs().mean() + 1e-3 * (o * o).sum()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUPLED)
def test_objectives_that_depend_on_the_number_of_rows_are_refused(kind: str) -> None:
    """On every rank, before anything changes; batches that divide go on as before."""
    make, loss = COUPLED[kind]
    model = seeded(make)
    made = trainer(model, dense_batch(8), loss, {"mesh": "dp=2"}, microbatches=1)
    plain = Plain(model, loss)
    for call in (made.step, made.eval_step):
        with pytest.raises(FxpartError, match="FXP114") as caught:
            call(dense_batch(3))
        assert "multiple of 2" in caught.value.problems[0].fix
    made.step(dense_batch(6))
    plain.update([dense_batch(6)])
    assert plain.off(made.state_dict()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_running_statistics_of_repeated_rows_are_refused(rows: int) -> None:
    """In training; evaluation uses the statistics and does not change them."""
    model, loss = seeded(Normalized), nn.MSELoss()
    made = trainer(model, dense_batch(8), loss, {"mesh": "dp=2"}, microbatches=1)
    before = made.state_dict()
    with pytest.raises(FxpartError, match="FXP114"):
        made.step(dense_batch(rows))
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())
    value, outputs = Plain(model, loss).evaluate(dense_batch(rows))
    assert abs(made.eval_step(dense_batch(rows)).item() - value) < 1e-6
    assert torch.allclose(made.predict(dense_batch(rows)[:1]), outputs, atol=1e-6)


class Straight(nn.Module):
    """A term whose value is zero and whose gradient grows with the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        return found + (found - found.detach()) * x.shape[0]


class Frequent(nn.Module):
    """An embedding whose gradient is divided by how often a token occurs in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN, scale_grad_by_freq=True)
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).transpose(1, 2)


def dice(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    both = found.sigmoid() * target
    return 1 - (2 * both.sum() + 0.01) / (found.sigmoid().sum() + target.sum() + 0.01)


# Each gives nearly, or at first, the same for repeated rows.
HIDDEN_SUMS: dict[str, Any] = {
    "a sum that is zero": lambda o, t: (o - t).square().mean() + (o.abs() - 9).relu().sum(),
    "a small sum beside a constant": lambda o, t: (o - t).square().mean() + 100 + 1e-4 * o.sum(),
    "quantile": lambda o, t: (o - t).square().mean(1).quantile(0.7),
    "smoothed dice": dice,
    "variance": lambda o, t: nn.functional.mse_loss(o, t) + (o.var(0) - 1).square().mean(),
    "standardized targets": lambda o, t: nn.functional.mse_loss(o * t.std(), t),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", HIDDEN_SUMS)
def test_what_is_not_proved_is_refused(kind: str) -> None:
    """Whatever the numbers of the first batch are."""
    loss = HIDDEN_SUMS[kind]
    made = trainer(seeded(dense), dense_batch(8), loss, {"mesh": "dp=2"}, microbatches=1)
    with pytest.raises(FxpartError, match="FXP114"):
        made.step(dense_batch(33))
    plain = Plain(seeded(dense), loss)
    assert made.step(dense_batch(6)).item() == pytest.approx(
        plain.update([dense_batch(6)]), rel=1e-5
    )


@pytest.mark.slow
def test_gradients_that_depend_on_the_number_of_rows_are_refused() -> None:
    made = trainer(seeded(Straight), dense_batch(8), nn.MSELoss(), {"mesh": "dp=2"}, microbatches=1)
    with pytest.raises(FxpartError, match="FXP114"):
        made.step(dense_batch(5))
    loss = nn.CrossEntropyLoss()
    made = trainer(seeded(Frequent), tagger_batch(8), loss, {"mesh": "dp=2"}, microbatches=1)
    with pytest.raises(FxpartError, match="FXP114"):
        made.step(tagger_batch(5))


def valid(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(found, labels, ignore_index=0)


def masked(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = (labels > 3).float()
    each = nn.functional.cross_entropy(found, labels, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def guarded(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = (labels > 3).float()
    each = nn.functional.cross_entropy(found, labels, reduction="none")
    return (each * mask).sum() / (mask.sum() + 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [valid, masked, guarded], ids=lambda made: made.__name__)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_sums_over_counted_tokens_may_be_repeated(loss: Any, microbatches: int) -> None:
    model = seeded(Tagger)
    made = trainer(model, tagger_batch(8), loss, {"mesh": "dp=2"}, microbatches=microbatches)
    plain = Plain(model, loss)
    for rows in (8, 5, 1, 7):
        batch = tagger_batch(rows)
        assert made.step(batch).item() == pytest.approx(plain.update([batch]), abs=1e-6)
        assert made.eval_step(batch).item() == pytest.approx(plain.evaluate(batch)[0], abs=1e-6)
    assert plain.off(made.state_dict()) < 1e-6


@pytest.mark.slow
def test_a_divisor_that_does_not_grow_as_rows_do_is_refused() -> None:
    def bounded(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = (labels > 3).float()
        each = nn.functional.cross_entropy(found, labels, reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1000)

    made = trainer(seeded(Tagger), tagger_batch(8), bounded, {"mesh": "dp=2"}, microbatches=1)
    with pytest.raises(FxpartError, match="FXP114"):
        made.step(tagger_batch(5))


@pytest.mark.slow
def test_pairs_of_rows_cannot_be_repeated() -> None:
    """An input with the rows in two dims, such as a mask of pairs."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return mask @ self.layer(x)

    model = Pairs()
    batch = (torch.randn(8, 4), torch.eye(8), torch.randn(8, 3))
    made = trainer(model, batch, nn.MSELoss(), {"mesh": "dp=2"}, microbatches=1)  # type: ignore[arg-type]
    with pytest.raises(FxpartError, match="FXP105"):
        made.step((torch.randn(3, 4), torch.eye(3), torch.randn(3, 3)))


@pytest.mark.slow
def test_accumulation_and_clipping_with_a_smaller_batch() -> None:
    loss, model = nn.CrossEntropyLoss(), seeded(Tagger)
    batches = [tagger_batch(count, seed) for seed, count in enumerate((8, 3, 8, 1))]
    constraints = {"mesh": "dp=2", "stages": 2, "zero": 1}
    made = trainer(model, batches[0], loss, constraints, clip_norm=0.05)
    plain = Plain(model, loss)
    made.fit(batches, accumulate=2, epochs=2)
    for group in (batches[:2], batches[2:]) * 2:
        plain.update(group, 0.05)
    assert made.last_rows == 1
    assert plain.off(made.state_dict()) < 1e-6


@pytest.mark.slow
def test_metrics_get_each_row_once() -> None:
    model, loss = seeded(dense), nn.MSELoss()
    made = trainer(model, dense_batch(8), loss, {"mesh": "dp=4"})
    batches = [dense_batch(count) for count in (8, 6, 1)]
    seen: list[int] = []

    def largest(outputs: torch.Tensor, batch: Any) -> float:
        seen.append(len(outputs))
        return float((outputs - batch[1]).abs().max())

    found = made.evaluate(batches, {"largest": largest})
    expected = [Plain(model, loss).evaluate(batch) for batch in batches]
    errors = [float((o - b[1]).abs().max()) for (_, o), b in zip(expected, batches, strict=True)]
    weights = torch.tensor([8.0, 6.0, 1.0]) / 15
    assert seen == [8, 6, 1]
    assert found["largest"] == pytest.approx(float((torch.tensor(errors) * weights).sum()))
    assert found["loss"] == pytest.approx(
        sum(v * len(b[0]) for (v, _), b in zip(expected, batches, strict=True)) / 15
    )


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["naive", "stash"])
def test_asynchronous_data_parallel_stages(weights: str) -> None:
    """Stages that update by themselves; the rows of one replica alone and of two are the same."""
    rows, states, loss = (8, 8, 3, 8, 1), [], nn.MSELoss()
    for mesh in ("none", "dp=2"):
        constraints = {"mode": "async", "weights": weights, "mesh": mesh, "stages": 2}
        made = trainer(seeded(dense), dense_batch(8), loss, constraints, microbatches=1)
        for seed, count in enumerate(rows):
            made.step(dense_batch(count, seed))
        made.drain()
        states.append(made.state_dict())
        made.close()
    for name, value in states[0].items():
        assert torch.allclose(states[1][name], value, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["turns", "queue"])
def test_replicated_stages(mode: str) -> None:
    """Fewer rows than there are replicas of a stage."""
    loss, model = nn.MSELoss(), seeded(dense)
    constraints: dict[str, Any] = {"copies": "always", "ranks": 3, "stages": 2, "mesh": "none"}
    if mode == "queue":
        constraints = {**constraints, "mode": "queue"}
    made = trainer(model, dense_batch(12), loss, constraints, microbatches=6, cluster="local:3")
    plain = Plain(model, loss)
    for seed, count in enumerate((12, 5, 1, 12)):
        made.step(dense_batch(count, seed))
        plain.update([dense_batch(count, seed)])
    assert made.spec.replicas
    assert plain.off(made.state_dict()) < 1e-6
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_fixed_microbatch_size_refuses_what_is_no_multiple(microbatches: int) -> None:
    """And of one microbatch all other sizes."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(len(x)):
                pass
            return self.layer(x)

    model, loss = Fixed(), nn.MSELoss()
    size = 4 * microbatches
    program = fxpart.compile(
        model, "local:1", example_inputs=dense_batch(size), loss=loss, microbatches=microbatches,
        batch_dims={"x": 0, "target": 0},
    )  # fmt: skip
    made, plain = program.trainer(sgd), Plain(model, loss)
    for rows in (size,) if microbatches == 1 else (8, 12, 4):
        assert made.step(dense_batch(rows)).item() == pytest.approx(
            plain.update([dense_batch(rows)])
        )
    with pytest.raises(FxpartError, match="FXP105") as caught:
        made.step(dense_batch(3))
    assert "multiple of 4" in caught.value.problems[0].fix
    if microbatches == 1:
        with pytest.raises(FxpartError, match="for one microbatch"):
            made.step(dense_batch(8))


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_rows_are_divided(multiple: int, microbatches: int) -> None:
    for rows in range(1, 40):
        found = split_rows(rows, multiple, microbatches)
        assert sum(found) == rows and 1 <= len(found) <= microbatches and min(found) > 0
        assert all(count % multiple == 0 for count in found[:-1])
        assert all(count * count_repeats(count, multiple) % multiple == 0 for count in found)
        if microbatches > 1 and rows > multiple:
            assert count_repeats(found[-1], multiple) == 1 or found[-1] < multiple


def root(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum() / out.shape[0] ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("constraints", [{"mesh": "none", "stages": 2}, {"mesh": "dp=2"}])
def test_a_loss_divided_by_a_root_of_the_number_of_rows(constraints: dict[str, Any]) -> None:
    """The root is that of all rows of the batch, not of a microbatch or a rank."""
    model = seeded(lambda: nn.Sequential(dense(), nn.Tanh(), nn.Linear(3, 3)))
    made = trainer(model, dense_batch(8), root, constraints, microbatches=2)
    plain = Plain(model, root)
    for rows in (8, 6, 8):
        made.step(dense_batch(rows))
        plain.update([dense_batch(rows)])
    assert plain.off(made.state_dict()) < 1e-5
