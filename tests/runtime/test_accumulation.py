"""Several batches to an update: the update of one batch of all rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from partial_batch_programs import (
    Plain,
    Tagger,
    accumulate_in_parts,
    dense,
    dense_batch,
    fit_accumulated,
    seeded,
    tagger_batch,
    trainer,
)
from ranks import Pool
from torch import nn

from fxpart.errors import FxpartError
from fxpart.runtime.gradients.reducer import GradientAccumulation

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": "none", "stages": 1},
    "pipeline": {"mesh": "none", "stages": 2},
    "zero bubble": {"mesh": "none", "stages": 2, "schedule": "zb-h1"},
    "data": {"mesh": "dp=2", "stages": 1},
    "tensor": {"mesh": "tp=2", "stages": 1},
    "zero 1": {"mesh": "dp=2", "stages": 2, "zero": 1},
    "zero 2": {"mesh": "dp=2", "stages": 2, "zero": 2},
    "zero 3": {"mesh": "dp=2", "stages": 1, "zero": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_fit_averages_by_rows(layout: str, clip: float | None) -> None:
    """Unequal batches, an incomplete last group, clipping, and the reported loss."""
    found = fit_accumulated(LAYOUTS[layout], clip)
    assert found["steps"] == 4
    assert found["loss"] < 1e-6 and found["state"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "zero 2"])
def test_fit_averages_by_rows_over_gloo(pool: Pool, layout: str) -> None:
    constraints = LAYOUTS[layout]
    ranks = 2 * constraints["stages"]
    for found in pool.run(fit_accumulated, constraints, 0.05, ranks=ranks):
        assert found["loss"] < 1e-6 and found["state"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
def test_ranks_without_labels_know_what_a_batch_weighs(pool: Pool, microbatches: int) -> None:
    for loss, state in pool.run(accumulate_in_parts, microbatches, ranks=2):
        assert loss < 1e-6 and state < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "pipeline", "zero 2"])
def test_steps_and_backwards_average_alike(layout: str) -> None:
    """step(accumulate=True), and backward and update by hand, over tied parameters."""
    loss, rows = nn.CrossEntropyLoss(), (8, 4, 8)
    model = seeded(Tagger)
    batches = [tagger_batch(count, seed) for seed, count in enumerate(rows)]
    stepped, by_hand = (trainer(model, batches[0], loss, LAYOUTS[layout]) for _ in range(2))
    plain = Plain(model, loss)
    for _ in range(2):
        for number, batch in enumerate(batches):
            stepped.step(batch, accumulate=number < 2)
            by_hand.backward(batch)
        by_hand.update()
        plain.update(batches)
        assert plain.off(stepped.state_dict()) < 1e-6
        assert plain.off(by_hand.state_dict()) < 1e-6


@pytest.mark.slow
def test_sparse_gradients_are_averaged() -> None:
    loss, model = nn.CrossEntropyLoss(), seeded(partial(Tagger, sparse=True, tied=False))
    plain_sgd = partial(torch.optim.SGD, lr=0.5)
    batches = [tagger_batch(count, seed) for seed, count in enumerate((8, 2, 4))]
    made = trainer(model, batches[0], loss, LAYOUTS["pipeline"], optimizer=plain_sgd)
    plain = Plain(model, loss, plain_sgd)
    made.fit(batches, accumulate=3)
    plain.update(batches)
    assert plain.off(made.state_dict()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline", "data"])
def test_one_batch_to_an_update_keeps_every_bit(layout: str) -> None:
    """After groups of several batches as well."""
    loss, model = nn.MSELoss(), seeded(dense)
    first, second = (trainer(model, dense_batch(8), loss, LAYOUTS[layout]) for _ in range(2))
    for seed in range(3):
        first.step(dense_batch(8, seed))
        second.backward(dense_batch(8, seed))
        second.update()
    states = [made.state_dict() for made in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_a_dropped_batch_does_not_count() -> None:
    """Neither do batches that were accumulated before zero_grad, nor a refused one."""
    loss, model = nn.MSELoss(), seeded(dense)
    made, plain = trainer(model, dense_batch(8), loss, LAYOUTS["pipeline"]), Plain(model, loss)
    made.backward(dense_batch(8, 1))
    made.backward((dense_batch(8, 2)[0] * float("nan"), dense_batch(8, 2)[1]))
    made.zero_grad()
    made.update()  # nothing waits for it
    kept = [dense_batch(8, 3), dense_batch(4, 4)]
    made.backward(kept[0])
    with pytest.raises(FxpartError, match="FXP105"):
        made.backward((torch.zeros(8, 5), torch.zeros(8, 3)))
    made.step(kept[1])
    plain.update(kept)
    assert made.updates == 1
    assert plain.off(made.state_dict()) < 1e-6


@pytest.mark.slow
def test_accumulation_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    """One between two batches of an update is refused; a resumed run accumulates as before."""
    loss, model = nn.MSELoss(), seeded(dense)
    batches = [dense_batch(count, seed) for seed, count in enumerate((8, 4, 8, 8))]
    made, plain = trainer(model, batches[0], loss, LAYOUTS["pipeline"]), Plain(model, loss)
    made.step(batches[0], accumulate=True)
    with pytest.raises(FxpartError, match="FXP109"):
        made.save_checkpoint(tmp_path)
    made.step(batches[1])
    made.save_checkpoint(tmp_path)
    resumed = trainer(model, batches[0], loss, LAYOUTS["data"])
    resumed.load_checkpoint(tmp_path)
    resumed.fit(batches[2:], accumulate=2)
    plain.update(batches[:2])
    plain.update(batches[2:])
    assert plain.off(resumed.state_dict()) < 1e-6


@pytest.mark.slow
def test_asynchronous_trainers_refuse_to_accumulate() -> None:
    model, loss = seeded(dense), nn.MSELoss()
    for constraints in ({"mode": "async", "stages": 2}, {"mode": "queue", "stages": 2}):
        made = trainer(model, dense_batch(8), loss, constraints)
        for call in (
            partial(made.step, dense_batch(8), accumulate=True),
            partial(made.fit, [dense_batch(8)], accumulate=2),
        ):
            with pytest.raises(FxpartError, match="FXP109"):
                call()
        made.close()


def test_weights_are_relative_to_the_first_batch() -> None:
    waiting = GradientAccumulation()
    factors = []
    for weight in (4.0, 8.0, 2.0):
        factors.append(waiting.factor(weight))
        waiting.add(weight)
    assert factors == [1.0, 2.0, 0.5]
    assert (waiting.batches, waiting.total) == (3, 3.5)
    waiting.reset()
    assert waiting.factor(7.0) == 1.0 and waiting.total == 0.0


@pytest.mark.slow
def test_optimizer_state_sees_the_mean() -> None:
    """An optimizer that is not invariant to the scale of gradients, with weight decay."""
    adamw = partial(torch.optim.AdamW, lr=0.01, eps=1e-2, weight_decay=0.1)
    loss, model = nn.L1Loss(), seeded(dense)
    batches = [dense_batch(count, seed) for seed, count in enumerate((8, 6, 2, 8))]
    made = trainer(model, batches[0], loss, LAYOUTS["zero 1"], optimizer=adamw)
    plain = Plain(model, loss, adamw)
    made.fit(batches, accumulate=2, epochs=2)
    for group in (batches[:2], batches[2:]) * 2:
        plain.update(group)
    assert plain.off(made.state_dict()) < 1e-6


@pytest.mark.parametrize("layout", ["one rank", "data"])
def test_given_weights_and_total(layout: str) -> None:
    """The gradient of an update is the sum of weighted gradients over the given total."""
    loss, model = nn.CrossEntropyLoss(), seeded(Tagger)
    batches = [tagger_batch(8, seed) for seed in range(2)]
    made = trainer(model, batches[0], loss, LAYOUTS[layout])
    expected: dict[str, torch.Tensor] = {}
    for batch, weight in zip(batches, (3.0, 0.5), strict=True):
        made.backward(batch, weight=weight)
        model.zero_grad()
        loss(model(*batch[:-1]), batch[-1]).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, 0.0) + weight / 4.0 * parameter.grad
    made.update(total=4.0)
    found = made.gradients()
    assert expected
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-7), name


def test_loss_and_outputs_of_one_forward() -> None:
    loss, model = nn.CrossEntropyLoss(), seeded(Tagger)
    batch = tagger_batch(8, 0)
    made = trainer(model, batch, loss, LAYOUTS["pipeline"])
    value, outputs = made.predict_with_loss(batch)
    assert value is not None and torch.equal(value, made.eval_step(batch))
    assert torch.equal(outputs, made.predict(batch))
