"""A plan's schedule in time agrees with the closed form and follows the plan's own edges."""

from __future__ import annotations

import msgspec
import pytest
import sample_plans

from fxpart.errors import FxpartError
from fxpart.plan import Plan
from fxpart.report.timeline import plan_schedule, plan_timeline, transfer_seconds
from fxpart.schedule.action import Kind


def without_transfers(plan: Plan) -> Plan:
    """The plan with free links."""
    ranks = tuple(msgspec.structs.replace(r, transfer_seconds=0.0) for r in plan.prediction.ranks)
    return msgspec.structs.replace(
        plan, prediction=msgspec.structs.replace(plan.prediction, ranks=ranks)
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_equal_stages_take_the_closed_form(name: str, stages: int, microbatches: int) -> None:
    plan = without_transfers(sample_plans.plan(stages, microbatches))
    timeline = plan_timeline(plan, name)
    # F + B is 30 ms; fill once, then one microbatch after the other.
    assert timeline.step_seconds == pytest.approx((stages + microbatches - 1) * 0.030)
    assert timeline.bubble == pytest.approx((stages - 1) / (stages + microbatches - 1))


def test_another_number_of_microbatches() -> None:
    plan = without_transfers(sample_plans.plan(4, 8))
    assert plan_timeline(plan, microbatches=2).step_seconds == pytest.approx(5 * 0.030)


def test_edges_of_the_plan_are_served() -> None:
    plan = msgspec.structs.replace(
        sample_plans.plan(3, 2), edges=((0, 1, True), (0, 2, False), (1, 2, True))
    )
    actions = [a for rank in plan_schedule(plan).ranks for a in rank]
    sends = {(a.stage, a.peer) for a in actions if a.kind is Kind.SEND_F}
    back = {(a.stage, a.peer) for a in actions if a.kind is Kind.SEND_B}
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
