"""Uneven cases that users of planners complain of: what a sensible plan does, and why."""

from __future__ import annotations

import numpy as np
import pytest
from joint_uneven import cases
from msgspec.structs import replace
from oracles.joint_baselines import even

from fxpart.solver.joint.objective import evaluate
from fxpart.solver.joint.portfolio import solve
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_option_devices
from fxpart.solver.joint.what_if import with_devices


def planned(problem: JointProblem) -> tuple[JointChoice, float]:
    """The planner's choice, proven within 1 %, and its seconds."""
    found = solve(problem, time_limit=60)
    assert found.choice is not None
    assert found.bound >= found.objective * 0.99
    assert evaluate(problem, found.choice).feasible
    return found.choice, found.objective


def layers(problem: JointProblem, choice: JointChoice) -> list[int]:
    """Layers on each stage: its blocks without the first one and the head."""
    widths: list[int] = np.diff([*choice.starts, len(problem.blocks)]).tolist()
    widths[0] -= 1
    widths[-1] -= 1
    return widths


def faster_than_even(problem: JointProblem, seconds: float) -> float:
    """The share of the even split's step time that the plan saves."""
    choice = even(problem)
    assert choice is not None
    return 1 - seconds / evaluate(problem, choice).seconds


def test_a_large_vocabulary_head() -> None:
    """A head of 256k words costs as much as four layers: its stage holds fewer layers.

    With equal numbers of blocks the last stage would be the slowest by half, and every other stage
    would wait for it in every microbatch.
    """
    problem = cases()["large head"]
    choice, seconds = planned(problem)
    held = layers(problem, choice)
    assert len(held) == 4
    assert held[-1] <= min(held[:-1]) - 3
    assert faster_than_even(problem, seconds) > 0.15


def test_a_heavy_first_block() -> None:
    """An encoder before the stack that costs as much as five layers: stage 0 holds fewer."""
    problem = cases()["heavy first block"]
    choice, seconds = planned(problem)
    held = layers(problem, choice)
    assert len(held) == 4
    assert held[0] <= min(held[1:]) - 3
    assert faster_than_even(problem, seconds) > 0.2


def test_thirty_layers_on_four_stages() -> None:
    """30 is no multiple of 4: two stages hold 8 layers, two hold 7, and which ones has a reason.

    The ends hold 7, because they also hold the first block and the head, light as these are.
    """
    problem = cases()["30 layers on 4 devices"]
    choice, seconds = planned(problem)
    assert layers(problem, choice) == [7, 8, 8, 7]
    assert faster_than_even(problem, seconds) >= 0  # 32 blocks happen to be a multiple of 4


def test_thirty_layers_and_a_head_on_four_stages() -> None:
    """The head costs two layers: with 6 layers its stage takes as long as the others with 8.

    8, 8, 8, 6 is the only split without a stage of 9, which any even one has.
    """
    problem = cases()["30 layers and a head on 4 devices"]
    choice, seconds = planned(problem)
    assert layers(problem, choice) == [8, 8, 8, 6]
    assert faster_than_even(problem, seconds) > 0.05


def test_thirty_layers_on_four_stages_in_tight_memory() -> None:
    """Under 1F1B the first stage holds activations of 4 microbatches and the last of 1.

    Where 8 layers with 3 in flight are too much, the longer stages are the last two: 7, 8, 8, 7
    does not fit, and every other split of 30 that fits has a stage of 9.
    """
    roomy = cases()["30 layers on 4 devices"]
    limit = 8 * 40 + 3 * (8 * 10 + 10) - 1  # state and activations of 8 layers, a received value
    problem = replace(roomy, pools=tuple(replace(p, memory=limit) for p in roomy.pools))
    choice, _ = planned(problem)
    assert layers(problem, choice) == [7, 7, 8, 8]
    assert even(problem) is None


@pytest.mark.parametrize("devices", [6, 7])
def test_six_or_seven_devices(devices: int) -> None:
    """Counts that are no power of two: all devices work, rather than 4 of them.

    Planners over meshes of powers of two leave 2 or 3 devices idle. 4 devices at best take 6/4 or
    7/4 of the time.
    """
    problem = cases()[f"{devices} devices"]
    choice, seconds = planned(problem)
    used = sum(count_option_devices(problem, problem.options[o]) for o in choice.options)
    assert used == devices
    _, on_four = planned(with_devices(problem, (4,)))
    assert on_four / seconds > 0.9 * devices / 4


def test_one_slower_device() -> None:
    """One device of four has half the speed: it gets about half as many layers as the others.

    Left out, three devices would have all the work; with an equal share, all would wait for it.
    """
    problem = cases()["one slower device"]
    choice, seconds = planned(problem)
    held = layers(problem, choice)
    slow = [h for h, o in zip(held, choice.options, strict=True) if problem.options[o].pool == 1]
    fast = [h for h, o in zip(held, choice.options, strict=True) if problem.options[o].pool == 0]
    assert len(slow) == 1
    assert len(fast) == 3
    assert 0.4 * min(fast) <= slow[0] <= 0.6 * max(fast)
    assert faster_than_even(problem, seconds) > 0.05
    fast_alone = tuple(o for o in problem.options if o.pool == 0)
    _, without = planned(replace(problem, options=fast_alone))
    assert seconds < 0.95 * without


def test_one_device_with_half_the_memory() -> None:
    """It is the last stage, where 1F1B keeps one microbatch in flight, with the fewest layers.

    There its memory holds 5 layers, anywhere else 3 or 4, and some other stage would need 8.
    Planners that take the smallest memory for all devices find no plan at all.
    """
    problem = cases()["one device with half the memory"]
    choice, _ = planned(problem)
    assert [problem.options[o].pool for o in choice.options] == [0, 0, 0, 1]
    assert layers(problem, choice) == [6, 7, 7, 5]
    smallest = tuple(replace(p, memory=problem.pools[1].memory) for p in problem.pools)
    assert solve(replace(problem, pools=smallest), time_limit=60).status == "infeasible"


def test_an_odd_microbatch_count() -> None:
    """7 microbatches on 4 stages: nothing has to be a multiple of anything.

    7 microbatches take 7 + 3 times the longest stage. 4 would be a multiple of the stages, but hold
    2 of the 7 rows each: 4 + 3 times twice as much.
    """
    problem = cases()["7 microbatches"]
    choice, seconds = planned(problem)
    assert choice.microbatches == 7
    assert layers(problem, choice) == [10, 10, 10, 10]
    longest = max(stage.seconds for stage in evaluate(problem, choice).stages)
    assert seconds == pytest.approx((7 + 3) * longest, rel=0.01)
    _, with_four = planned(replace(problem, microbatches=(4,)))
    assert seconds < 0.8 * with_four
