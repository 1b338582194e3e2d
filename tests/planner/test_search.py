"""Which proposals are priced exactly: equal devices once, and no further than estimates allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from fxpart.passes.lower import LowerPass
from planning_cases import NetworkShape, captured
from torch import fx

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.planner import search
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.group_orders import expand_assignments, is_unequal
from fxpart.planner.request import make_request
from fxpart.planner.sharding_decision import ShardingCache


@dataclass(frozen=True)
class Estimate:
    """A proposal, of which only its estimate counts."""

    expected_seconds: float

    @property
    def mesh(self) -> Estimate:
        return self


@pytest.mark.parametrize(
    ("exact", "reach"), [([2.0, 4.0], 1.0), ([1.8, 3.6], 1 / 0.9), ([1.8, 4.0], 1 / 0.81)]
)
def test_reach_is_what_the_best_factor_and_their_spread_allow(
    exact: list[float], reach: float
) -> None:
    """Estimates of 2 and 4 seconds; where prices are 0.9 of them, another may be, too."""
    seconds: dict[Any, float] = dict(zip(map(Estimate, (2.0, 4.0)), exact, strict=True))
    assert search._compute_reach(seconds) == pytest.approx(reach)


def test_pairs_avoid_the_slowest_link_where_devices_remain() -> None:
    """Two fast and two slow devices behind a slow link: three pairs of fast ones need no such link.

    The best pairs first would leave the two fast devices of that host for each other.
    """
    kinds = [(1e12, "h0")] * 4 + [(1e12, "h1")] * 2 + [(1e11, "h1")] * 2
    cluster = Cluster(
        name="unlike",
        devices=tuple(
            Device(name=f"d{n}", kind="gpu", model=f"{rate:g}", host=host, memory=1 << 30,
                   flops={"float32": rate}, bandwidth=rate / 4)
            for n, (rate, host) in enumerate(kinds)
        ),
        links=tuple(
            Link(source=at, target=at, latency=1e-5, bandwidth=bandwidth)
            for at, bandwidth in (("h0", 3e9), ("h1", 3e8), ("*", 1e9))
        ),
    )  # fmt: skip
    request = make_request(cluster, "adamw", "auto", {"mesh": "dp=2", "stages": 3}, 0)
    found = expand_assignments(request, StageAssignment(stages=3), every=False)
    first = [
        [set(order[at : at + 2]) for at in (0, 2, 4)]
        for order in (one.order or tuple(range(8)) for one in found)
    ]
    assert any({4, 5} not in pairs and set().union(*pairs) == set(range(6)) for pairs in first)


def test_hosts_in_round_robin_order_in_a_group_of_all_devices() -> None:
    """Tensor ranks on both hosts, whose own links start slowly: in either order of the devices."""
    every = {"memory": 1 << 30, "flops": {"float32": 1e12}, "bandwidth": 1e11}
    devices = [
        Device(name=f"d{n}", kind="gpu", model="m", host=f"h{n // 4}", **every)  # type: ignore[arg-type]
        for n in range(8)
    ]
    links = (
        Link(source="h0", target="h0", latency=1e-4, bandwidth=1e9),
        Link(source="h1", target="h1", latency=1e-4, bandwidth=1e9),
        Link(source="*", target="*", latency=1e-6, bandwidth=1e9),
    )
    for order in (range(8), (0, 4, 1, 5, 2, 6, 3, 7)):
        cluster = Cluster(name="turns", devices=tuple(devices[n] for n in order), links=links)
        request = make_request(cluster, "adamw", "auto", {"mesh": "dp=2,tp=4", "stages": 1}, 0)
        found = expand_assignments(request, StageAssignment(stages=1), every=True)
        names = [[cluster.devices[n].host for n in one.order or range(8)] for one in found]
        assert ["h0", "h1"] * 4 in names


@pytest.mark.parametrize("every", [False, True])
def test_devices_in_one_order_are_priced_once(every: bool) -> None:
    """Equal hosts: the order of the cluster is also the best one by speed and by links."""
    cluster = Cluster.parse("2x2xh100")
    assert is_unequal(cluster)  # links inside a host are faster
    request = make_request(cluster, "adamw", "auto", {"mesh": "tp=2"}, 0)
    given = StageAssignment(stages=2)
    found = expand_assignments(request, given, every=every)
    ordered = [
        (one.order or tuple(range(4)), min(one.limit or 2, 2))
        for one in (*found, replace(given, order=(0, 1, 2, 3)))
    ]
    assert len(set(ordered)) == len(found)
    assert ordered[-1] in ordered[:-1]


def test_sharded_graphs_are_lowered_once_for_all_clusters_and_zero_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faster links change prices, and ZeRO 1 and 2 change memory, but not the ops of a rank."""
    program = replace(captured(NetworkShape("chain", (8, 8), 1, 4)), _shardings=ShardingCache())
    fresh = replace(program, _shardings=ShardingCache())
    lowered: list[LowerPass] = []
    run = LowerPass.run

    def count(self: LowerPass, graph: fx.GraphModule) -> fx.GraphModule:
        lowered.append(self)
        return run(self, graph)

    monkeypatch.setattr(LowerPass, "run", count)
    slow, fast = Cluster.parse("2xa100"), Cluster.parse("2xh100")
    given = {"mesh": "dp=2", "microbatches": 1}
    program.replan(slow, constraints={**given, "zero": 1})
    assert len(lowered) == 1
    plans = [program.replan(fast, constraints={**given, "zero": zero}).plan for zero in (1, 2)]
    assert len(lowered) == 1, "the graph of the first plan is priced again"
    assert plans[1] == fresh.replan(fast, constraints={**given, "zero": 2}).plan
    assert len(lowered) == 2, "another program has graphs of its own"
