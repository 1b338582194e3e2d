"""A stream that drains, or has one stage: the bits of synchronous training."""

from __future__ import annotations

from typing import Any

import hand_lanes
import hand_stages
import pytest
import torch
from hand_stages import batch, branches, language
from runtime_programs import bits
from stream_programs import losses_of, make

from fxpart.runtime import InProcess
from fxpart.schedule.weight_modes import MODES


def both(
    hand: Any, steps: list[Any], optimizer: str, weights: str, **options: Any
) -> tuple[list[Any], list[Any]]:
    """(losses, state, optimizer state) of a synchronous trainer, and of a stream."""
    found = []
    for more in ({}, {"weights": weights}):
        made = hand()
        trainer = make(made, InProcess(len(made.stages)), optimizer, **options, **more)
        losses = losses_of(trainer, steps)
        inner = trainer.optimizer_state_dict()
        numbers = {
            n: bits({k: torch.as_tensor(v) for k, v in slots.items()})
            for n, slots in inner["state"].items()
        }
        found.append([losses, bits(trainer.state_dict()), numbers, inner["param_groups"]])
    return found[0], found[1]


STEPS = [batch(seed=seed) for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("cut", [(4,), (2, 2), (1, 1, 1, 1)])
def test_flush(cut: tuple[int, ...], optimizer: str) -> None:
    """A skip connection, batch statistics, dropout, and where there are four stages a tie."""
    model = {"tied": len(cut) == 4}
    a, b = both(lambda: language(cut, **model), STEPS, optimizer, "flush", microbatches=3)
    assert a == b


@pytest.mark.parametrize("mode", MODES)
def test_one_stage(mode: str) -> None:
    """Nothing is ever in flight: every mode is the synchronous trainer."""
    optimizer = "nadam" if mode == "nadam-stash" else "sgd"
    a, b = both(lambda: language((4,), tied=False), STEPS, optimizer, mode, clip_norm=0.3)
    assert a == b


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.05}, {"clip_value": 0.001}, {"clip_norm": 0.2}]
)
def test_clipping_where_the_pipeline_drains(options: dict[str, float]) -> None:
    """It looks at the norm of all stages' gradients."""
    a, b = both(lambda: language((1, 1, 1, 1)), STEPS, "sgd", "flush", **options)
    assert a == b


def test_frozen_layers() -> None:
    a, b = both(lambda: language((1, 1, 1, 1), frozen=True), STEPS, "adamw", "flush")
    assert a == b


def test_a_tie_between_branches() -> None:
    """Neither branch's backward comes first by the flow of gradients."""
    a, b = both(branches, STEPS, "adamw", "flush", microbatches=4)
    assert a == b


def test_batches_of_other_sizes() -> None:
    """Fewer rows, fewer microbatches, another length."""
    steps = [batch(8, 5, 0), batch(6, 5, 1), batch(1, 5, 2), batch(8, 3, 3), batch(8, 5, 4)]
    a, b = both(lambda: language((1, 1, 1, 1)), steps, "adamw", "flush", microbatches=4)
    assert a == b


def test_a_warm_up_is_synchronous() -> None:
    found = []
    for more in ({}, {"weights": "spectrain", "warm_up": len(STEPS)}):
        trainer = make(language((1, 1, 1, 1)), InProcess(4), "adamw", **more)
        found.append((losses_of(trainer, STEPS), bits(trainer.state_dict())))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}])
def test_lanes_of_data_parallel_stages(clip: dict[str, float]) -> None:
    """Two mesh ranks, four stages: sums over mesh ranks before each stage's update."""
    found = []
    for more in ({}, {"weights": "flush"}):
        made = hand_lanes.data_parallel(hand_stages.branches, 2, 0, **clip, **more)
        found.append((losses_of(made, STEPS), bits(made.state_dict())))
        made.close()
    assert found[0] == found[1]
