"""The placement problem: enumeration agrees, bounds hold, replicas stay whole."""

from __future__ import annotations

import msgspec
import pytest
from oracles.assignment_brute import placements, solve_brute
from topologies import random_topology

from fxpart.errors import FxpartError
from fxpart.solver.assignment.assignment_ilp import pack_whole
from fxpart.solver.assignment.bounds import lower_bound
from fxpart.solver.assignment.greedy import build_initial_assignment
from fxpart.solver.assignment.objective import AssignmentScorer, evaluate
from fxpart.solver.assignment.portfolio import solve_device_assignment
from fxpart.solver.assignment.problem import (
    AssignmentProblem,
    AssignmentStage,
    InterconnectDomain,
    LinearCost,
    RingCollective,
    StageFlow,
)
from fxpart.solver.assignment.units import has_whole_replicas


def two_hosts(
    groups: list[AssignmentStage], flows: list[StageFlow], uplink: float = 0.0
) -> AssignmentProblem:
    """Two hosts of two devices: a byte takes 1 s inside and 4 s between them."""
    return AssignmentProblem(
        groups=tuple(groups),
        flows=tuple(flows),
        places=(
            InterconnectDomain(host=0, kind=0, devices=(2,)),
            InterconnectDomain(host=1, kind=0, devices=(2,)),
        ),
        inside=(LinearCost(inverse=1.0),),
        between=((LinearCost(latency=0.5, inverse=4.0),),),
        uplinks=(uplink, uplink),
        microbatches=5,
    )


def test_the_step_by_hand() -> None:
    groups = [
        AssignmentStage(seconds=2.0, once=1.0),
        AssignmentStage(seconds=3.0),
        AssignmentStage(seconds=1.0, once=20.0),
    ]
    flows = [
        StageFlow(source=0, target=1, size=1.0, back=True),
        StageFlow(source=1, target=2, size=0.5, messages=2.0),
        StageFlow(source=0, target=2, size=0.25, step=True),
    ]
    found = evaluate(two_hosts(groups, flows), ((0,), (0,), (1,)))
    first, second, third = found.stages
    assert second.transfer_seconds == 2.0  # 1 byte inside, there and back
    assert third.transfer_seconds == 3.0  # two messages of 0.5 s, 0.5 bytes of 4 s
    assert (first.transfer_seconds, third.tie_seconds) == (0.0, 1.5)
    # t = 2, 5, 4 and beta = 1, 0, 21.5; four more microbatches on the slowest
    assert found.seconds == 11.0 + max(4 * 2 + 1, 4 * 5, 4 * 4 + 21.5)


def test_lanes_share_a_card() -> None:
    groups = [AssignmentStage(data=2, seconds=1.0), AssignmentStage(data=2, seconds=1.0)]
    flow = StageFlow(source=0, target=1, size=1.0)
    assignment = ((0, 0), (1, 1))
    alone = evaluate(two_hosts(groups, [flow]), assignment)
    assert alone.stages[1].transfer_seconds == 4.5
    shared = evaluate(two_hosts(groups, [flow], uplink=4.0), assignment)
    assert shared.stages[1].transfer_seconds == 8.0  # both bytes over one card
    assert shared.card_seconds == 4 * 8.0
    beside = evaluate(two_hosts(groups, [flow], uplink=4.0), ((0, 1), (0, 1)))
    assert (beside.stages[1].transfer_seconds, beside.card_seconds) == (1.0, 0.0)


def test_a_card_binds_though_no_stage_does() -> None:
    """Four stages that send over one card: each is quick, the card is not."""
    groups = [AssignmentStage(seconds=1.0) for _ in range(4)]
    flows = [StageFlow(source=0, target=2, size=1.0), StageFlow(source=1, target=3, size=1.0)]
    found = evaluate(two_hosts(groups, flows, uplink=3.0), ((0,), (0,), (1,), (1,)))
    assert found.card_seconds == 4 * 6.0
    assert found.seconds == (1 + 1 + 5.5 + 5.5) + 24.0  # 4 * 5.5 is less


def test_more_lanes_than_devices_is_a_fault() -> None:
    found = evaluate(two_hosts([AssignmentStage(data=3)], []), ((0, 0, 0),))
    assert found.faults == ("domain 0 has 2 devices of pool 0, but 3 are assigned",)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_problems_agree_with_enumeration(part: int) -> None:
    for seed in range(50 * part, 50 * (part + 1)):
        topology = random_topology(seed)
        best, found = solve_brute(topology), solve_device_assignment(topology)
        assert found.status == best.status, seed
        if best.assignment:
            assert found.seconds == pytest.approx(best.seconds, rel=1e-6), seed
            assert found.bound <= best.seconds * (1 + 1e-9), seed
            assert evaluate(topology, found.assignment).faults == (), seed


@pytest.mark.slow
def test_the_cheap_bound_holds_for_every_placement() -> None:
    for seed in range(60):
        topology = random_topology(seed, lanes=5)
        bound, scorer = lower_bound(topology), AssignmentScorer(topology)
        tighter = lower_bound(topology, whole=True)
        assert tighter >= bound * (1 - 1e-9)
        for assignment in placements(topology):
            known = tighter if has_whole_replicas(topology, assignment) else bound
            assert scorer.evaluate(assignment).seconds >= known * (1 - 1e-9), seed


def test_greedy_fits_whenever_anything_does() -> None:
    for seed in range(200):
        topology = random_topology(seed)
        assignment = build_initial_assignment(topology)
        assert (assignment is None) == (next(placements(topology), None) is None)
        assert assignment is None or not evaluate(topology, assignment).faults


@pytest.mark.slow
def test_equal_problems_give_equal_answers() -> None:
    for seed in range(10):
        topology = random_topology(seed, lanes=8)
        again = msgspec.json.decode(msgspec.json.encode(topology), type=AssignmentProblem)
        assert solve_device_assignment(topology) == solve_device_assignment(again)


def test_replicas_stay_whole_where_first_fit_cuts_one() -> None:
    """5 + 3 + 2 and 4 + 3 + 3 fill two hosts of ten; first fit decreasing leaves 5 + 4 + ..."""
    widths = (5, 4, 3, 3, 3, 2)
    places = tuple(InterconnectDomain(host=h, kind=0, devices=(10,)) for h in range(2))
    topology = AssignmentProblem(
        groups=tuple(AssignmentStage(tensor=w, exchange=RingCollective(size=1.0)) for w in widths),
        flows=(),
        places=places,
        inside=(LinearCost(inverse=1.0),),
        between=((LinearCost(inverse=9.0),),),
        uplinks=(0.0, 0.0),
    )
    assignment = build_initial_assignment(topology)
    assert assignment is not None and not has_whole_replicas(topology, assignment)
    assert pack_whole(topology) is not None
    found = solve_device_assignment(topology)
    assert has_whole_replicas(topology, found.assignment) and found.status == "optimal"


def test_too_many_lanes_to_enumerate() -> None:
    with pytest.raises(FxpartError, match="too many"):
        solve_brute(two_hosts([AssignmentStage(data=9)], []))
