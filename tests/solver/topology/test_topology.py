"""The placement problem: enumeration agrees, bounds hold, replicas stay whole."""

from __future__ import annotations

import msgspec
import pytest
from topologies import random_topology

from fxpart.errors import FxpartError
from fxpart.solver.topology.assignment_ilp import pack_whole
from fxpart.solver.topology.atoms import is_whole
from fxpart.solver.topology.bounds import lower_bound
from fxpart.solver.topology.brute import placements, solve_brute
from fxpart.solver.topology.greedy import first_seats
from fxpart.solver.topology.objective import TopologyScorer, evaluate
from fxpart.solver.topology.problem import Flow, Group, Line, Place, Ring, Topology
from fxpart.solver.topology.solve import solve_topology


def two_hosts(groups: list[Group], flows: list[Flow], uplink: float = 0.0) -> Topology:
    """Two hosts of two devices: a byte takes 1 s inside and 4 s between them."""
    return Topology(
        groups=tuple(groups),
        flows=tuple(flows),
        places=(Place(host=0, kind=0, devices=(2,)), Place(host=1, kind=0, devices=(2,))),
        inside=(Line(inverse=1.0),),
        between=((Line(latency=0.5, inverse=4.0),),),
        uplinks=(uplink, uplink),
        microbatches=5,
    )


def test_the_step_by_hand() -> None:
    groups = [Group(seconds=2.0, once=1.0), Group(seconds=3.0), Group(seconds=1.0, once=20.0)]
    flows = [
        Flow(source=0, target=1, size=1.0, back=True),
        Flow(source=1, target=2, size=0.5, messages=2.0),
        Flow(source=0, target=2, size=0.25, step=True),
    ]
    found = evaluate(two_hosts(groups, flows), ((0,), (0,), (1,)))
    first, second, third = found.stages
    assert second.transfer_seconds == 2.0  # 1 byte inside, there and back
    assert third.transfer_seconds == 3.0  # two messages of 0.5 s, 0.5 bytes of 4 s
    assert (first.transfer_seconds, third.tie_seconds) == (0.0, 1.5)
    # t = 2, 5, 4 and beta = 1, 0, 21.5; four more microbatches on the slowest
    assert found.seconds == 11.0 + max(4 * 2 + 1, 4 * 5, 4 * 4 + 21.5)


def test_lanes_share_a_card() -> None:
    groups = [Group(data=2, seconds=1.0), Group(data=2, seconds=1.0)]
    flow = Flow(source=0, target=1, size=1.0)
    seats = ((0, 0), (1, 1))
    alone = evaluate(two_hosts(groups, [flow]), seats)
    assert alone.stages[1].transfer_seconds == 4.5
    shared = evaluate(two_hosts(groups, [flow], uplink=4.0), seats)
    assert shared.stages[1].transfer_seconds == 8.0  # both bytes over one card
    assert shared.card_seconds == 4 * 8.0
    beside = evaluate(two_hosts(groups, [flow], uplink=4.0), ((0, 1), (0, 1)))
    assert (beside.stages[1].transfer_seconds, beside.card_seconds) == (1.0, 0.0)


def test_a_card_binds_though_no_stage_does() -> None:
    """Four stages that send over one card: each is quick, the card is not."""
    groups = [Group(seconds=1.0) for _ in range(4)]
    flows = [Flow(source=0, target=2, size=1.0), Flow(source=1, target=3, size=1.0)]
    found = evaluate(two_hosts(groups, flows, uplink=3.0), ((0,), (0,), (1,), (1,)))
    assert found.card_seconds == 4 * 6.0
    assert found.seconds == (1 + 1 + 5.5 + 5.5) + 24.0  # 4 * 5.5 is less


def test_more_lanes_than_devices_is_a_fault() -> None:
    found = evaluate(two_hosts([Group(data=3)], []), ((0, 0, 0),))
    assert found.faults == ("place 0 has 2 devices of pool 0, 3 are taken",)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_problems_agree_with_enumeration(part: int) -> None:
    for seed in range(50 * part, 50 * (part + 1)):
        topology = random_topology(seed)
        best, found = solve_brute(topology), solve_topology(topology)
        assert found.status == best.status, seed
        if best.seats:
            assert found.seconds == pytest.approx(best.seconds, rel=1e-6), seed
            assert found.bound <= best.seconds * (1 + 1e-9), seed
            assert evaluate(topology, found.seats).faults == (), seed


@pytest.mark.slow
def test_the_cheap_bound_holds_for_every_placement() -> None:
    for seed in range(60):
        topology = random_topology(seed, lanes=5)
        bound, scorer = lower_bound(topology), TopologyScorer(topology)
        tighter = lower_bound(topology, whole=True)
        assert tighter >= bound * (1 - 1e-9)
        for seats in placements(topology):
            known = tighter if is_whole(topology, seats) else bound
            assert scorer.evaluate(seats).seconds >= known * (1 - 1e-9), seed


def test_greedy_fits_whenever_anything_does() -> None:
    for seed in range(200):
        topology = random_topology(seed)
        seats = first_seats(topology)
        assert (seats is None) == (next(placements(topology), None) is None)
        assert seats is None or not evaluate(topology, seats).faults


def test_equal_problems_give_equal_answers() -> None:
    for seed in range(10):
        topology = random_topology(seed, lanes=8)
        again = msgspec.json.decode(msgspec.json.encode(topology), type=Topology)
        assert solve_topology(topology) == solve_topology(again)


def test_replicas_stay_whole_where_first_fit_cuts_one() -> None:
    """5 + 3 + 2 and 4 + 3 + 3 fill two hosts of ten; first fit decreasing leaves 5 + 4 + ..."""
    widths = (5, 4, 3, 3, 3, 2)
    places = tuple(Place(host=h, kind=0, devices=(10,)) for h in range(2))
    topology = Topology(
        groups=tuple(Group(tensor=w, exchange=Ring(size=1.0)) for w in widths),
        flows=(),
        places=places,
        inside=(Line(inverse=1.0),),
        between=((Line(inverse=9.0),),),
        uplinks=(0.0, 0.0),
    )
    seats = first_seats(topology)
    assert seats is not None and not is_whole(topology, seats)
    assert pack_whole(topology) is not None
    found = solve_topology(topology)
    assert is_whole(topology, found.seats) and found.status == "optimal"


def test_too_many_lanes_to_enumerate() -> None:
    with pytest.raises(FxpartError, match="too many"):
        solve_brute(two_hosts([Group(data=9)], []))
