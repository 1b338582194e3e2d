"""Pools of devices and the lines of their collectives, against looking at every pair."""

from __future__ import annotations

import random
from itertools import product

import pytest
from fxpart.costmodels import find
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.pricing.device_limits import RESERVE, limits
from fxpart.pricing.joint_device_pools import BUCKET, ReplicaCollectiveTimes, device_pools
from fxpart.pricing.joint_space import data_degrees, host_size, microbatch_counts, tensor_degrees


def device(host: int, number: int, model: str, memory: int = 100) -> Device:
    return Device(
        name=f"h{host}/gpu:{number}", kind="gpu", model=model, host=f"h{host}", memory=memory,
        flops={"float32": 100.0 if model == "a" else 50.0}, bandwidth=1000.0, source="test",
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Hosts of several models and memories, with links between hosts and single devices."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    hosts = rng.randint(1, 5)
    devices = tuple(
        device(h, d, rng.choice("ab"), rng.choice((100, 100, 200)))
        for h in range(hosts)
        for d in range(rng.randint(1, 3))
    )
    ends = ["*", *(f"h{h}" for h in range(hosts)), *(d.name for d in devices)]
    pairs = {("*", "*")} | {(rng.choice(ends), rng.choice(ends)) for _ in range(rng.randint(0, 6))}
    pairs = {(a, b) for a, b in pairs if (a == "*") == (b == "*")}
    links = tuple(
        Link(source=a, target=b, latency=rng.uniform(0, 1), bandwidth=rng.uniform(1, 9))
        for a, b in sorted(pairs)
    )
    return Cluster(name="drawn", devices=devices, links=links)


@pytest.mark.slow
@given(clusters())
def test_worst_links_are_those_of_all_pairs(cluster: Cluster) -> None:
    model, links = find("auto"), LinkIndex(cluster)
    pools = device_pools(cluster, model)
    of = {}
    for d in cluster.devices:
        of[d.name] = next(
            i for i, p in enumerate(pools)
            if p.sample.model == d.model and p.pool.memory == int(d.memory * (1 - RESERVE))
        )  # fmt: skip
    assert sum(p.pool.devices for p in pools) == len(cluster.devices)
    for index, pool in enumerate(pools):
        found = [
            (s, t, links(s.name, t.name), links(t.name, s.name))
            for s, t in product(cluster.devices, repeat=2)
            if s is not t and of[t.name] == index
        ]
        line = pool.pool.transfer
        latencies = [(k.latency + back.latency) / 2 for _, _, k, back in found]
        assert line.latency == max(latencies, default=0.0)
        inverses = [(1 / k.bandwidth + 1 / back.bandwidth) / 2 for _, _, k, back in found]
        assert line.inverse == pytest.approx(max(inverses, default=0.0), rel=1e-6)
        own = [(s, t, k) for s, t, k, _ in found if of[s.name] == index]
        near = [1 / k.bandwidth for s, t, k in own if s.host == t.host]
        far = [1 / k.bandwidth for s, t, k in own if s.host != t.host]
        assert (pool.near is None) == (not near)
        assert (pool.far is None) == (not far)
        assert pool.near is None or 1 / pool.near.bandwidth == max(near)
        assert pool.far is None or 1 / pool.far.bandwidth == max(far)


def test_a_missing_link_is_an_error() -> None:
    with pytest.raises(FxpartError):
        device_pools(Cluster(name="x", devices=(device(0, 0, "a"), device(1, 0, "a")), links=()),
                     find("auto"))  # fmt: skip


def test_memory_is_that_of_places_and_hosts_are_counted() -> None:
    cluster = Cluster.parse("16x8xh100")
    (pool,) = device_pools(cluster, find("auto"))
    assert pool.pool.memory == limits(cluster, find("auto"))[0].memory
    assert (pool.pool.devices, pool.pool.host) == (128, 8)


def test_thousands_of_hosts_cost_a_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    real = LinkIndex.__call__

    def counted(self: LinkIndex, source: str, target: str) -> Link:
        looks.append((source, target))
        return real(self, source, target)

    monkeypatch.setattr(LinkIndex, "__call__", counted)
    (pool,) = device_pools(Cluster.parse("2048x8xh100"), find("auto"))
    assert pool.pool.devices == 16384
    assert len(looks) <= 20


def test_rings_fill_hosts_and_lines_lie_just_above_buckets() -> None:
    model = find("auto")
    (pool,) = device_pools(Cluster.parse("16x8xh100"), model)
    lines = ReplicaCollectiveTimes(model)
    kinds = {
        (count, stride): [link.kind for link in lines.ring(pool, count, stride)]
        for count, stride in ((8, 1), (2, 4), (2, 8), (16, 1), (16, 8), (1, 8))
    }
    assert kinds[8, 1] == ["nvlink"] * 8
    assert kinds[2, 4] == ["nvlink"] * 2
    assert kinds[2, 8] == ["net"] * 2
    assert sorted(kinds[16, 1]) == ["net"] * 2 + ["nvlink"] * 14
    assert kinds[16, 8] == ["net"] * 16
    assert kinds[1, 8] == []
    ring = lines.ring(pool, 16, 8)
    line = lines.line("partial", "replicate", ring)
    start = model.reshard("partial", "replicate", 0.0, ring).seconds
    for size in (1, BUCKET // 3, BUCKET, 7 * BUCKET + 5):
        full, rest = divmod(size, BUCKET)
        exact = full * model.reshard("partial", "replicate", float(BUCKET), ring).seconds
        exact += model.reshard("partial", "replicate", float(rest), ring).seconds if rest else 0.0
        assert exact * (1 - 1e-9) <= line(size) <= exact + start * (1 + 1e-9)
    assert line(0) == 0


def test_degrees() -> None:
    assert tensor_degrees(8, 16) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert tensor_degrees(8, 32) == (1, 2, 4, 8)
    assert tensor_degrees(6, 18) == (1, 2, 3, 4, 6)
    assert tensor_degrees(7, 21) == (1, 2, 4, 7)
    assert max(tensor_degrees(1024, 1024)) == 64
    assert data_degrees(6) == (1, 2, 3, 4, 5, 6)
    large = data_degrees(1000)
    assert {1, 512, 768, 1000, 250, 125} <= set(large)
    assert len(large) < 40
    assert microbatch_counts(8, 2) == (1, 2, 3, 4, 8)
    assert {1, 1536, 96, 512} <= set(microbatch_counts(1536, 64))


def test_the_size_of_most_hosts_counts() -> None:
    devices = [device(h, d, "a") for h, n in enumerate((4, 4, 2)) for d in range(n)]
    assert host_size(Cluster(name="x", devices=tuple(devices), links=())) == 4
