"""Laws of plans: larger clusters, labels, reported decisions, memory, directions of links."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import fxpart
from fxpart import Cluster, Device, FxpartError, Link, Plan, Program
from fxpart.planner.prediction.plan_timeline import plan_timeline

pytestmark = pytest.mark.slow

ROWS, WIDTH, CLASSES = 12, 96, 24
EXACT = 1 + 1e-9


class Mixing(nn.Module):
    """Three residual blocks whose sizes have the divisors 2, 3, 4, 6 and 8, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


def devices(count: int, hosts: int = 1, memory: int = 10**9) -> tuple[Device, ...]:
    """Return equal accelerators, on hosts of equal size."""
    return tuple(
        Device(
            name=f"d{i}", kind="gpu", model="made", host=f"h{i * hosts // count}", memory=memory,
            flops={"float32": 2e11}, bandwidth=2e10,
        )
        for i in range(count)
    )  # fmt: skip


def cluster(count: int, hosts: int = 1, memory: int = 10**9) -> Cluster:
    """Return equal devices with equal links between any two."""
    links = (Link(source="*", target="*", latency=2e-6, bandwidth=2e10),)
    return Cluster(name="made", devices=devices(count, hosts, memory), links=links)


@cache
def program() -> Program:
    """Return the model, captured once."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    return fxpart.compile(
        Mixing(), cluster(1), example_inputs=(x, y), loss=nn.functional.cross_entropy
    )


def planned(where: Cluster, microbatches: int | None = None, **constraints: int | str) -> Plan:
    return program().replan(where, microbatches=microbatches, constraints=constraints).plan


def seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


@pytest.mark.parametrize("count", [3, 4, 6])
def test_no_mesh_is_faster_and_one_device_more_is_never_slower(count: int) -> None:
    free = seconds(planned(cluster(count)))
    meshes = [f"{axis}={count}" for axis in ("tp", "dp")] + ["none"]
    meshes += ["dp=2,tp=3", "dp=3,tp=2"] if count == 6 else []
    for mesh in meshes:
        assert free <= seconds(planned(cluster(count), mesh=mesh)) * EXACT, mesh
    assert seconds(planned(cluster(count + 1))) <= free * EXACT


def test_labels_of_hosts_with_equal_links_change_nothing() -> None:
    assert seconds(planned(cluster(4, hosts=2))) == seconds(planned(cluster(4)))
    assert seconds(planned(cluster(4, hosts=4))) == seconds(planned(cluster(4)))


@pytest.mark.parametrize("count", [2, 4, 6])
def test_reported_decisions_can_be_fixed_and_forbidden(count: int) -> None:
    free = planned(cluster(count))
    stage = free.stages[0]
    reported = {
        "dp": stage.data_parallel,
        "tp": stage.tensor_parallel,
        "zero": stage.zero,
        "stages": len(free.stages),
    }
    again = planned(cluster(count), free.microbatches, **reported)
    assert seconds(again) == pytest.approx(seconds(free), rel=1e-9)
    for key in ("dp", "tp"):
        try:
            other = planned(cluster(count), forbid=f"{key}={reported[key]}")
        except FxpartError as fault:
            assert fault.code in ("FXP202", "FXP204")
            continue
        found = {"dp": other.stages[0].data_parallel, "tp": other.stages[0].tensor_parallel}
        assert found[key] != reported[key]
        assert seconds(other) >= seconds(free) / EXACT


def test_placements_are_selected_for_the_devices_that_are_used() -> None:
    """The fast devices come last; what a plan on them alone reports is fixed on all."""
    slow, fast = devices(3), devices(5)[3:]
    fast = tuple(
        replace(device, model="fast", flops={"float32": 2e13}, bandwidth=2e12) for device in fast
    )
    links = (Link(source="*", target="*", latency=2e-6, bandwidth=1e10),)
    where = Cluster(name="two kinds", devices=(*slow, *fast), links=links)
    alone = planned(Cluster(name="fast", devices=fast, links=links), mesh="tp=2")
    again = planned(where, alone.microbatches, dp=1, tp=2, zero=0, stages=1)
    assert again.devices == (3, 4)
    assert seconds(again) == pytest.approx(seconds(alone), rel=1e-9)


def test_more_memory_is_never_slower() -> None:
    times = []
    for memory in (1_000_000, 1_500_000, 2_500_000, 4_000_000, 10**9):
        try:
            times.append(seconds(planned(cluster(4, memory=memory))))
        except FxpartError as fault:
            assert fault.code == "FXP204"
            times.append(float("inf"))
    assert times[-1] < float("inf")
    assert all(more <= less * EXACT for less, more in pairwise(times)), times


def test_both_directions_of_a_link_are_priced() -> None:
    sent = ROWS * CLASSES * 4 / 1e5  # the smallest value at a cut, of all rows, or its gradient
    times, simulated = [], []
    for rates in ((1e5, 1e11), (1e11, 1e5)):
        links = tuple(
            Link(source=a, target=b, latency=1e-6, bandwidth=rate)
            for (a, b), rate in zip((("d0", "d1"), ("d1", "d0")), rates, strict=True)
        )
        where = Cluster(name="uneven", devices=devices(2), links=links)
        plan = planned(where, 4, stages=2, mesh="none")
        times.append(seconds(plan))
        simulated.append(plan.prediction.simulated_seconds)
        assert plan_timeline(plan).step_seconds == pytest.approx(simulated[-1], rel=1e-9)
    assert min(*times, *simulated) >= sent
    assert times[0] == pytest.approx(times[1], rel=1e-9)  # a gradient is as large as its value


def across(**options: str | bool) -> Cluster:
    """Return two hosts of two devices; options: of the links between the hosts."""
    between = [
        Link(source=a, target=b, latency=1e-6, bandwidth=1e8, kind="net", **options)  # type: ignore[arg-type]
        for a, b in (("h0", "h1"), ("h1", "h0"))
    ]
    inside = [Link(source=h, target=h, latency=1e-6, bandwidth=1e11) for h in ("h0", "h1")]
    return Cluster(name="two hosts", devices=devices(4, 2), links=(*between, *inside))


def test_a_shared_link_is_slower() -> None:
    constraints = {"mesh": "dp=2,tp=2", "stages": 1}
    own = seconds(planned(across(), **constraints))
    card = seconds(planned(across(shared=True), **constraints))
    segment = seconds(planned(across(segment="switch"), **constraints))
    assert own * 1.2 < card < segment  # two rings share a card; a segment also both directions


def test_stages_share_the_link_between_them() -> None:
    """Two replicas send at once from the stage of one host to that of the other."""
    constraints = {"mesh": "dp=2", "stages": 2}
    own = planned(across(), 2, **constraints)
    card = planned(across(shared=True), 2, **constraints)
    sent = own.prediction.ranks[1].transfer_seconds
    assert card.stages[0].last == own.stages[0].last
    twice = 2 * sent - 2e-6  # the latencies there and back are not shared
    assert card.prediction.ranks[1].transfer_seconds == pytest.approx(twice, rel=1e-9)


def test_a_mesh_without_room_names_the_memory_of_one_device() -> None:
    with pytest.raises(FxpartError) as caught:
        planned(cluster(6, memory=200_000), mesh="tp=2")
    assert caught.value.code == "FXP204"
    assert "there are 179.69 KiB on a device" in str(caught.value)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_memory_that_is_enough_for_a_plan_is_enough_to_find_it(level: int) -> None:
    """With ZeRO, placements are selected under memory in which the unsharded state does not fit."""
    constraints = {"mesh": "dp=2,tp=2", "stages": 1, "zero": level}
    ample = planned(cluster(4), **constraints)
    rank = ample.prediction.ranks[0]
    unsharded = planned(cluster(4), mesh="dp=2,tp=2", stages=1).prediction.ranks[0]
    assert rank.tensors < unsharded.tensors and rank.memory_limit
    memory = round(1.01 * rank.tensors * 10**9 / rank.memory_limit)
    tight = planned(cluster(4, memory=memory), **constraints)
    assert seconds(tight) == pytest.approx(seconds(ample), rel=1e-9)
