"""Training in pieces gives the numbers of one process, in process and over gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hand_stages import ADAMW, Whole, batch, language
from ranks import Pool
from runtime_programs import bits, make, train

from fxpart.runtime import InProcess, Trainer

SHAPES = ((8, 5), (8, 7), (5, 7), (1, 3))  # new lengths, smaller batches, one row


def oracle(shapes: Any, model: dict[str, Any], microbatches: int = 4, clip: Any = None) -> Whole:
    whole = Whole(language(**model), ADAMW, clip)
    whole.losses = [  # type: ignore[attr-defined]
        whole.step(batch(rows, length, seed), microbatches)
        for seed, (rows, length) in enumerate(shapes)
    ]
    return whole


def trainer(cut: tuple[int, ...] = (1, 1, 1, 1), **options: Any) -> Trainer:
    model = options.pop("model", {})
    return make(language(cut, **model), InProcess(len(cut)), **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cut", [(4,), (2, 2), (1, 2, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("frozen", [False, True])
def test_every_bit_is_that_of_one_process(
    cut: tuple[int, ...], schedule: str, frozen: bool
) -> None:
    """Dropout, batch statistics, a skip, a mask without batch dim, clipping, smaller batches."""
    model: dict[str, Any] = {"tied": False, "frozen": frozen}
    whole = oracle(SHAPES, model, clip=0.1)
    parts = trainer(cut, model=model, schedule=schedule, clip_norm=0.1)
    losses = [parts.step(batch(*shape, seed)) for seed, shape in enumerate(SHAPES)]
    assert [float(x) for x in losses] == [float(x) for x in whole.losses]  # type: ignore[attr-defined]
    assert parts.last_grad_norm is not None and whole.norm is not None
    assert torch.equal(parts.last_grad_norm, whole.norm)
    state = parts.state_dict()
    assert bits(whole.state()).items() <= bits(state).items()


@pytest.mark.parametrize("cut", [(2, 2), (1, 1, 1, 1)])
def test_a_tie_across_stages(cut: tuple[int, ...]) -> None:
    """The very numbers of one process, although gradients are sums over stages."""
    whole = oracle(SHAPES, {}, clip=0.1)
    parts = trainer(cut, clip_norm=0.1)
    for seed, shape in enumerate(SHAPES):
        parts.step(batch(*shape, seed))
        copies = parts.parts.state.entries["embed.weight"].copies
        assert len(copies) == 2
        first, second = copies.values()
        assert first is not second
        assert torch.equal(first, second)
        assert first.grad is not None and second.grad is not None
        assert torch.equal(first.grad, second.grad)
    state = parts.state_dict()
    assert bits(whole.state()).items() <= bits(state).items()
    assert parts.last_grad_norm is not None and whole.norm is not None
    assert torch.equal(parts.last_grad_norm, whole.norm)
    assert torch.equal(state["head.tied"], state["embed.weight"])


@pytest.mark.parametrize("times", [2, 3])
def test_k_accumulations_give_k_times(times: int) -> None:
    model = {"dropout": 0.0}
    once, more = trainer(model=model, optimizer=None), trainer(model=model, optimizer=None)
    once.backward(batch())
    for _ in range(times):
        more.backward(batch())
    single, summed = once.gradients(), more.gradients()
    assert set(single) == set(summed) == {
        "embed.weight", "mix.weight", "mix.bias", "norm.weight", "norm.bias"
    }  # fmt: skip
    for name, gradient in single.items():
        assert torch.allclose(summed[name], times * gradient, rtol=1e-5, atol=1e-7), name


def test_accumulated_steps_are_those_of_one_process() -> None:
    whole = Whole(language(tied=False), ADAMW, 0.1)
    parts = trainer(model={"tied": False}, clip_norm=0.1)
    for seed in range(4):
        update = seed % 2 == 1
        loss = parts.step(batch(seed=seed), accumulate=not update)
        assert torch.equal(loss, whole.backward(batch(seed=seed), 4))
        if update:
            whole.update()
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


def test_gradients_are_those_of_one_process() -> None:
    whole = Whole(language(tied=False), ADAMW)
    parts = trainer(model={"tied": False}, optimizer=None)
    whole.backward(batch(), 4)
    parts.backward(batch())
    expected = {name: p.grad for name, p in whole.named.items() if p.grad is not None}
    assert bits(parts.gradients()) == bits(expected)
    # Reading them twice, or accumulating after it, must not sum ties a second time.
    assert bits(parts.gradients()) == bits(expected)


def test_reading_gradients_does_not_disturb_accumulation() -> None:
    """gradients() between two accumulated batches leaves the sum what it would have been."""
    read, quiet = (trainer(model={"dropout": 0.0}, optimizer=None) for _ in range(2))
    read.backward(batch())
    read.gradients()
    read.backward(batch(seed=1))
    quiet.backward(batch())
    quiet.backward(batch(seed=1))
    found, expected = read.gradients(), quiet.gradients()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-7), name


def test_learning_rate_schedulers_work() -> None:
    whole = Whole(language(tied=False), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    parts = trainer(model={"tied": False}, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert parts.optimizer is not None
    ours = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1, 0.5)
    theirs = torch.optim.lr_scheduler.StepLR(whole.optimizer, 1, 0.5)
    for seed in range(3):
        parts.step(batch(seed=seed))
        ours.step()
        whole.step(batch(seed=seed), 4)
        theirs.step()
    assert parts.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("tied", [False, True])
def test_gloo_gives_the_bits_of_one_process(
    pool: Pool, cut: tuple[int, ...], schedule: str, tied: bool
) -> None:
    """On every rank the same losses, state and norm as with all ranks in this process."""
    given = (cut, SHAPES, {"schedule": schedule, "clip_norm": 0.1}, {"tied": tied})
    expected = train(*given)
    for found in pool.run(train, *given, ranks=len(cut)):
        assert found == expected


@pytest.mark.slow
def test_gloo_with_more_microbatches_than_any_window(pool: Pool) -> None:
    given = ((1, 1, 1, 1), ((40, 4),), {"microbatches": 20}, {})
    expected = train(*given)
    assert pool.run(train, *given, ranks=4) == [expected] * 4


@pytest.mark.slow
def test_gloo_with_a_frozen_stage(pool: Pool) -> None:
    given = ((1, 1, 2), SHAPES, {}, {"frozen": True})
    expected = train(*given)
    assert pool.run(train, *given, ranks=3) == [expected] * 3
