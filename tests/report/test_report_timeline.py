"""A plan's schedule in time agrees with the closed form and follows the plan's own edges."""

from __future__ import annotations

import msgspec
import pytest
import sample_plans

from fxpart.errors import FxpartError
from fxpart.plan.model import HostLoad, Plan
from fxpart.plan.schedule import plan_schedule
from fxpart.planner.prediction.plan_timeline import plan_steps, plan_timeline, transfer_seconds
from fxpart.schedule.action import ActionKind


def bare(plan: Plan) -> Plan:
    """The plan with free links and nothing to do once a step."""
    ranks = tuple(
        msgspec.structs.replace(r, transfer_seconds=0.0, tie_seconds=0.0, optimizer_seconds=0.0)
        for r in plan.prediction.ranks
    )
    return msgspec.structs.replace(
        plan, prediction=msgspec.structs.replace(plan.prediction, ranks=ranks)
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_equal_stages_take_the_closed_form(name: str, stages: int, microbatches: int) -> None:
    plan = bare(sample_plans.plan(stages, microbatches))
    timeline = plan_timeline(plan, name)
    # F + B is 30 ms; fill once, then one microbatch after the other.
    assert timeline.step_seconds == pytest.approx((stages + microbatches - 1) * 0.030)
    assert timeline.bubble == pytest.approx((stages - 1) / (stages + microbatches - 1))


def test_another_number_of_microbatches() -> None:
    plan = bare(sample_plans.plan(4, 8))
    assert plan_timeline(plan, microbatches=2).step_seconds == pytest.approx(5 * 0.030)


def test_edges_of_the_plan_are_served() -> None:
    plan = msgspec.structs.replace(
        sample_plans.plan(3, 2), edges=((0, 1, True), (0, 2, False), (1, 2, True))
    )
    actions = [a for rank in plan_schedule(plan).ranks for a in rank]
    sends = {(a.stage, a.peer) for a in actions if a.kind is ActionKind.SEND_F}
    back = {(a.stage, a.peer) for a in actions if a.kind is ActionKind.SEND_B}
    assert sends == {(0, 1), (0, 2), (1, 2)}
    assert back == {(1, 0), (2, 1)}


def test_transfer_time_is_divided_over_what_a_stage_receives() -> None:
    plan = msgspec.structs.replace(
        sample_plans.plan(3, 2), edges=((0, 1, True), (0, 2, False), (1, 2, True))
    )
    costs = transfer_seconds(plan)
    assert costs[0, 1] == pytest.approx(0.001 / 2)
    assert costs[0, 2] == costs[1, 2] == pytest.approx(0.001 / 3)


def test_unknown_schedule() -> None:
    with pytest.raises(FxpartError) as caught:
        plan_timeline(sample_plans.plan(), "zigzag")
    assert caught.value.code == "FXP109" and "1f1b" in str(caught.value)


def crowded(plan: Plan, slowdown: tuple[float, ...], transfer: float = 0.0, full: int = 0) -> Plan:
    """The plan with all of its ranks on one host."""
    ranks = tuple(r for stage in plan.stages for r in stage.ranks)
    load = HostLoad(ranks=ranks, slowdown=slowdown, transfer=transfer, full=full)
    return msgspec.structs.replace(
        plan, prediction=msgspec.structs.replace(plan.prediction, hosts=(load,))
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_core_does_all_the_work(name: str) -> None:
    """Four stages on one core: the sum of all work; seconds in the plan are four times as long."""
    plan = crowded(bare(sample_plans.plan(4, 6)), (1.0, 2.0, 3.0, 4.0))
    assert plan_timeline(plan, name).step_seconds == pytest.approx(6 * 0.030)
    alone = plan_steps(plan, name, contention=False).timeline
    assert alone.step_seconds == pytest.approx((4 + 6 - 1) * 0.030 / 4)


def test_what_is_done_once_a_step_follows_for_all_at_once() -> None:
    plan = sample_plans.plan(3, 4)
    timeline = plan_timeline(plan)
    last = max(s.end for s in timeline.spans if s.track == "compute")
    once = [e.step_only_seconds for e in plan.prediction.ranks]
    assert [u.start for u in timeline.updates] == [last] * 3
    assert [u.end - u.start for u in timeline.updates] == pytest.approx(once)
    assert timeline.step_seconds == pytest.approx(last + max(once))
    several = plan_steps(plan, steps=3)
    assert several.ends == pytest.approx([timeline.step_seconds * k for k in (1, 2, 3)])
    running = plan_steps(plan, steps=3, flush=False)
    assert running.ends[-1] < several.ends[-1]
