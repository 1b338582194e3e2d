"""Which proposals are priced exactly: equal devices once, and no further than estimates allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from fxpart.cluster.model import Cluster
from fxpart.planner import search
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.group_orders import expand_assignments, is_unequal
from fxpart.planner.request import make_request


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
