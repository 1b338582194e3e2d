"""Stages on the devices of real clusters."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.files import to_json, to_toml
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.pricing.topology import Traffic, place_stages, pools_of, topology_of
from fxpart.solver.assignment.problem import RingCollective, StageFlow


def chain(stages: int, size: float = 1e8) -> tuple[StageFlow, ...]:
    return tuple(StageFlow(source=i, target=i + 1, size=size, back=True) for i in range(stages - 1))


def device(name: str, host: str, memory: int = 1 << 34) -> Device:
    return Device(
        name=name, kind="gpu", model="x", host=host, memory=memory, flops={"float32": 1e13},
        bandwidth=1e12,
    )  # fmt: skip


def link(source: str, target: str, bandwidth: float) -> Link:
    return Link(source=source, target=target, latency=1e-6, bandwidth=bandwidth)


def test_stages_that_talk_share_a_host() -> None:
    cluster = Cluster.parse("2x8xh100-sxm")
    found = place_stages(cluster, [(0, 1, 4)] * 4, Traffic(flows=chain(4), microbatches=8))
    hosts = [{cluster.devices[d].host for d in lanes} for lanes in found.ranks]
    assert hosts == [{"host0"}, {"host0"}, {"host1"}, {"host1"}]
    assert sorted(d for lanes in found.ranks for d in lanes) == list(range(16))
    assert found.bound <= found.seconds


def test_a_tensor_group_is_not_cut_where_it_can_be_whole() -> None:
    # in stage order 3 + 3 + 2 + ... wastes devices; the widest first fits all of them whole
    cluster = Cluster.parse("3x4xh100-sxm")
    traffic = Traffic(flows=chain(6), exchange=(RingCollective(size=1e9, messages=4),) * 6)
    widths = [(0, 1, 1), (0, 1, 2), (0, 1, 3), (0, 1, 1), (0, 1, 2), (0, 1, 3)]
    assert place_stages(cluster, widths, traffic).straddling == 0


def test_a_tensor_group_wider_than_a_host_is_cut_into_few() -> None:
    cluster = Cluster.parse("2x4xh100-sxm")
    found = place_stages(
        cluster, [(0, 1, 6)], Traffic(exchange=(RingCollective(size=1e9, messages=4),))
    )
    assert found.straddling == 1
    assert found.status == "optimal"  # one ring that must cross, and no more


def test_a_slow_link_between_two_devices_is_avoided() -> None:
    # a ring of four devices where only 0 - 2 - 1 - 3 is fast
    names = [f"d{i}" for i in range(4)]
    fast = {(0, 2), (2, 1), (1, 3)}
    links = [
        link(names[a], names[b], 1e11 if (a, b) in fast or (b, a) in fast else 1e9)
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    devices = tuple(device(name, "host") for name in names)
    cluster = Cluster(name="ring", devices=devices, links=tuple(links))
    found = place_stages(cluster, [(0, 1, 1)] * 4, Traffic(flows=chain(4), microbatches=4))
    assert found.ranks in (((0,), (2,), (1,), (3,)), ((3,), (1,), (2,), (0,)))
    assert found.status == "optimal"


def test_a_shared_card_is_spared() -> None:
    """Two pairs of stages: not both across hosts the same way, though each alone is as quick."""
    devices = tuple(device(f"{host}{i}", host) for host in "ab" for i in range(2))
    far = Link(source="*", target="*", latency=1e-6, bandwidth=1e10, shared=True)
    near = [link(host, host, 1e10) for host in "ab"]
    cluster = Cluster(name="card", devices=devices, links=(*near, far))
    flows = (StageFlow(source=0, target=2, size=1e9), StageFlow(source=1, target=3, size=1e9))
    traffic = Traffic(flows=flows, microbatches=4, seconds=(1e-6,) * 4)
    topology, _ = topology_of(cluster, [(0, 1, 1)] * 4, traffic)
    assert topology.uplinks == (1e-10, 1e-10)
    found = place_stages(cluster, [(0, 1, 1)] * 4, traffic)
    on = [cluster.devices[lanes[0]].host for lanes in found.ranks]
    ways = [(on[0], on[2]), (on[1], on[3])]
    assert ways[0] != ways[1] and found.status == "optimal"
    unshared = Link(source="*", target="*", latency=1e-6, bandwidth=1e10)
    plain = Cluster(name="card", devices=devices, links=(*near, unshared))
    assert topology_of(plain, [(0, 1, 1)] * 4, traffic)[0].uplinks == (0.0, 0.0)
    assert place_stages(plain, [(0, 1, 1)] * 4, traffic).seconds <= found.seconds


def test_shared_is_kept_in_files_and_left_out_where_it_was_not_said(tmp_path: Path) -> None:
    devices = (device("a", "h"), device("b", "i"))
    said = Cluster(
        name="card", devices=devices,
        links=(Link(source="*", target="*", latency=0.0, bandwidth=1e9, shared=True),),
    )  # fmt: skip
    for name in ("cluster.toml", "cluster.json"):
        said.dump(tmp_path / name)
        assert Cluster.load(tmp_path / name) == said
    plain = Cluster(name="card", devices=devices, links=(link("*", "*", 1e9),))
    assert "shared" not in to_json(plain) and "shared" not in to_toml(plain)
    assert plain.hash != said.hash


def test_devices_are_taken_as_they_stand_where_nothing_is_gained() -> None:
    cluster = Cluster.parse("4x4xh100-sxm")
    traffic = Traffic(
        flows=chain(4), microbatches=8, reduce=(RingCollective(size=1e6, messages=4),) * 4
    )
    found = place_stages(cluster, [(0, 1, 4)] * 4, traffic)
    assert [d for lanes in found.ranks for d in lanes] == list(range(16))
    # but not where that would cut a replica: 3 + 3 shards on hosts of four
    found = place_stages(cluster, [(0, 1, 3)] * 2, Traffic(flows=chain(2)))
    assert found.straddling == 0


@pytest.mark.parametrize("hosts", [16, 17])
def test_more_stages_than_can_be_enumerated_are_proved(hosts: int) -> None:
    """Pairs of stages on a host: every second flow must cross, and no more do."""
    cluster = Cluster.parse(f"{hosts}x8xh100-sxm")
    found = place_stages(cluster, [(0, 1, 4)] * 32, Traffic(flows=chain(32), microbatches=8))
    assert found.status == "optimal"
    crossing = sum(
        cluster.devices[a[0]].host != cluster.devices[b[0]].host
        for a, b in itertools.pairwise(found.ranks)
    )
    assert crossing == 15


def test_replicas_of_a_pipeline_lie_together() -> None:
    """Two stages of many narrow replicas: a replica of each on every host, not two of one."""
    cluster = Cluster.parse("32x8xh100-sxm")
    traffic = Traffic(
        flows=chain(2), reduce=(RingCollective(size=1e8, messages=10),) * 2, microbatches=8
    )
    found = place_stages(cluster, [(0, 32, 4)] * 2, traffic)
    assert found.status == "optimal"
    hosts = [[cluster.devices[d].host for d in lanes] for lanes in found.ranks]
    assert hosts[0] == hosts[1]


def test_pools_keep_to_their_devices() -> None:
    devices = (device("a", "h", 1 << 33), device("b", "h"), device("c", "h", 1 << 33))
    cluster = Cluster(name="two", devices=devices, links=(link("*", "*", 1e10),))
    assert pools_of(cluster) == (0, 1, 0)
    found = place_stages(cluster, [(1, 1, 1), (0, 2, 1)], Traffic(flows=chain(2)))
    assert found.ranks == ((1,), (0, 2))
    with pytest.raises(FxpartError, match="too few"):
        place_stages(cluster, [(1, 2, 1)], Traffic())


@pytest.mark.slow
def test_sixteen_thousand_devices() -> None:
    cluster = Cluster.parse("2048x8xh100-sxm")
    traffic = Traffic(
        flows=chain(16), exchange=(RingCollective(size=1e9, messages=96),) * 16, microbatches=64
    )
    found = place_stages(cluster, [(0, 128, 8)] * 16, traffic)
    assert found.straddling == 0
    assert found.status in ("optimal", "within gap")
    assert len({d for lanes in found.ranks for d in lanes}) == 16384
