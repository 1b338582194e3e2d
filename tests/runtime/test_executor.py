"""What the executor keeps, drops and waits for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from built_schedules import BUILDERS
from hand_stages import ADAMW, Whole, batch, branches, language
from ranks import Pool
from runtime_programs import bits, make, train_branches

from fxpart.runtime import InProcess


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_no_more_microbatches_are_alive_than_the_schedule_says(
    schedule: str, microbatches: int
) -> None:
    """A stage's output lives from its forward to its backward, and nothing outlives the step."""
    hand = language()
    trainer = make(hand, InProcess(4), schedule=schedule, microbatches=microbatches)
    alive: list[weakref.WeakSet[torch.Tensor]] = [weakref.WeakSet() for _ in hand.stages]
    most = [0] * 4

    def watch(index: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = inner(key, *inputs)
            alive[index].add(outputs[0])
            most[index] = max(most[index], len(alive[index]))
            return outputs

        return forward

    for index, stage in enumerate(hand.stages):
        stage.forward = watch(index, stage.forward)  # type: ignore[method-assign]
    trainer.step(batch(rows=12))
    expected = list(BUILDERS[schedule].in_flight(4, microbatches))
    assert most == expected
    assert [len(found) for found in alive] == [0] * 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_tie_between_branches_side_by_side(schedule: str) -> None:
    """Neither branch's backward comes first by the flow of gradients; the bits are the same."""
    whole = Whole(branches(), ADAMW, 0.1)
    parts = make(branches(), InProcess(4), schedule=schedule, clip_norm=0.1)
    for seed in range(3):
        assert torch.equal(parts.step(batch(seed=seed)), whole.step(batch(seed=seed), 4))
    assert bits(whole.state()).items() <= bits(parts.state_dict()).items()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gloo_with_branches(pool: Pool, schedule: str) -> None:
    expected = train_branches(schedule)
    assert pool.run(train_branches, schedule, ranks=4) == [expected] * 4


def test_evaluation_keeps_nothing() -> None:
    """Every tensor is dropped after its last use, and no gradient is left."""
    hand = language()
    trainer = make(
        hand, InProcess(4), evaluation=lambda: (hand.spec(), dict(enumerate(hand.stages)))
    )
    trainer.eval_step(batch())
    (executors,) = trainer._programs["eval_step"].engine._executors.values()
    assert all(not executor._cells for mesh_rank in executors for executor in mesh_rank)
    assert all(p.grad is None for stage in hand.stages for p in stage.parameters())
