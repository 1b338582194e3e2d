"""A device that has become slow gets fewer blocks, and the gain is that of the simulation."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
import torch
from torch import nn

import fxpart
from fxpart.elastic.rebalance import (
    find_slow_ranks,
    predict_busy_seconds,
    rebalance,
    slow_down_cluster,
    slow_down_prediction,
)
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.prediction.plan_timeline import plan_steps

BLOCKS, STAGES = 12, 3


class Layers(nn.Module):
    """Equal layers under a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(BLOCKS)]
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@pytest.fixture(scope="module")
def program() -> fxpart.Program:
    x = torch.zeros(64, 256)
    return fxpart.compile(
        Layers(), f"local:{STAGES}", example_inputs=(x, x), microbatches=8,
        constraints={"stages": STAGES},
    )  # fmt: skip


def measured(plan: Plan, slow: dict[int, float], unit: float = 1.7) -> dict[int, float]:
    return {
        rank: unit * each * slow.get(rank, 1.0) for rank, each in predict_busy_seconds(plan).items()
    }


def blocks(plan: Plan) -> dict[int, int]:
    """By rank."""
    return {stage.ranks[0]: stage.last - stage.first + 1 for stage in plan.stages}


@pytest.mark.slow
def test_a_slow_device_gets_fewer_blocks(program: fxpart.Program) -> None:
    assert blocks(program.plan) == {0: 4, 1: 4, 2: 4}
    found = rebalance(program, measured(program.plan, {1: 3.0}))
    assert found is not None and found.slow == {1: 3.0}
    new = blocks(found.program.plan)
    assert new[1] < min(new[0], new[2]) and sum(new.values()) == BLOCKS
    # The oracle: of all cuts and seats, the least largest load; the last stage may also hold the
    # loss, and a cut costs something, so a block more or less is none of ours.
    best = min(
        max((b - a) * factor for a, b, factor in zip((0, *c), (*c, BLOCKS), seat, strict=True))
        for c in combinations(range(1, BLOCKS), STAGES - 1)
        for seat in permutations((1.0, 3.0, 1.0))
    )
    load = max(count * (3.0 if rank == 1 else 1.0) for rank, count in new.items())
    assert load <= best + 1
    # 12 blocks' time on the slow device, then at most one more than the best.
    assert found.gain == pytest.approx(found.before / found.after)
    assert 1.2 < found.gain < 12 / best + 0.5
    unit = plan_steps(slow_down_prediction(program.plan, {1: 3.0})).timeline.step_seconds
    assert found.before == pytest.approx(1.7 * unit)
    assert "rank 1 is 3 times slower" in str(found)
    # What was trained goes on by the new plan: the same model, the same batch.
    old, plan = program.plan, found.program.plan
    assert plan.model == old.model
    assert (plan.batch_size, plan.microbatches, plan.world) == (64, 8, STAGES)


@pytest.mark.slow
def test_nothing_to_gain(program: fxpart.Program) -> None:
    plan = program.plan
    assert rebalance(program, measured(plan, {})) is None
    assert rebalance(program, measured(plan, {0: 1.1})) is None
    # All are slower: nobody is.
    assert rebalance(program, measured(plan, {0: 3.0, 1: 3.0, 2: 3.0})) is None
    assert rebalance(program, measured(plan, {2: 3.0}), least=100.0) is None


@pytest.mark.slow
def test_what_is_slow_is_told_by_its_own_past(program: fxpart.Program) -> None:
    """A stage that the plan mispredicts is no slow device."""
    plan = program.plan
    past = measured(plan, {2: 2.0})  # it was so from the beginning
    assert find_slow_ranks(plan, past, past) == {}
    assert find_slow_ranks(plan, past) == {2: 2.0}
    now = {rank: each * (3.1 if rank == 0 else 0.98) for rank, each in past.items()}
    assert find_slow_ranks(plan, now, past) == {0: 3.25}
    cluster = slow_down_cluster(plan, {0: 2.0})
    first, second = cluster.devices[:2]
    assert first.bandwidth == second.bandwidth / 2 and first.launch == second.launch * 2
    assert "2 times slower as measured" in first.source
    assert cluster.devices[1:] == plan.cluster.devices[1:]
    with pytest.raises(FxpartError) as caught:
        find_slow_ranks(plan, {0: 1.0, 1: 0.0})
    assert caught.value.problems[0].where == "ranks 1, 2"
