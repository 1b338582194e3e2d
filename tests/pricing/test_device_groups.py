"""Links between groups of devices, by classes of equal links, beside every pair looked up."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import product

import pytest

from fxpart import Cluster, Device, FxpartError, Link, costmodels
from fxpart.cluster.link_index import LinkIndex
from fxpart.planner.mesh_plan import find_even_count
from fxpart.pricing.device_groups import group_devices, shared_resource
from fxpart.pricing.device_limits import limits, line


def drawn(seed: int) -> Cluster | None:
    """Return devices on hosts, with links between any, hosts or devices; None if one is missing."""
    r = random.Random(seed)
    count, hosts = r.randint(2, 9), r.randint(1, 4)
    on = [r.randrange(hosts) for _ in range(count)]
    if r.random() < 0.7:
        on.sort()
    devices = tuple(
        Device(
            name=f"d{i}", kind="gpu", model="made", host=f"h{host}", memory=10**9,
            flops={"float32": 1e12}, bandwidth=1e11,
        )
        for i, host in enumerate(on)
    )  # fmt: skip
    ends = ["*", *sorted({f"h{host}" for host in on})]
    ends += [f"d{r.randrange(count)}"] if r.random() < 0.4 else []
    links = {("*", "*"): link(r, "*", "*")}
    for _ in range(r.randint(0, 6)):
        a, b = r.choice(ends), r.choice(ends)
        b = a if r.random() < 0.5 else b
        links[a, b] = link(r, a, b)
    try:
        return Cluster(name="drawn", devices=devices, links=tuple(links.values())).validate()
    except FxpartError:
        return None


def link(r: random.Random, source: str, target: str) -> Link:
    shares = [{}, {}, {"shared": True}, {"segment": "one"}]
    return Link(
        source=source, target=target, latency=r.choice((1e-6, 3e-6, 1e-5)),
        bandwidth=r.choice((5e8, 1e10, 3e10)), kind=r.choice(("net", "nvlink")),
        **r.choice(shares),
    )  # fmt: skip


def naive(cluster: Cluster, one: list[Device], other: list[Device]) -> tuple[float, float]:
    """Return the worst latency and bandwidth between two groups, from every pair of devices."""
    links = LinkIndex(cluster)
    pairs = [(a, links(a.name, b.name)) for a, b in product(one, other)]
    used = Counter(shared_resource(found, a) for a, found in pairs)
    rates = []
    for a, found in pairs:
        resource = shared_resource(found, a)
        rates.append(found.bandwidth / (-(-used[resource] // len(other)) if resource else 1))
    return max(found.latency for _, found in pairs), min(rates)


@pytest.mark.slow
def test_links_between_groups_and_limits_are_those_of_every_pair() -> None:
    checked = 0
    for seed in range(250):
        cluster = drawn(seed)
        if cluster is None:
            continue
        devices, model = list(cluster.devices), costmodels.find("auto", cluster)
        for size in range(1, len(devices) // 2 + 1):
            groups = [devices[k : k + size] for k in range(0, len(devices) - size + 1, size)]
            grouped = group_devices(cluster, size)
            links = LinkIndex(grouped)
            for (a, one), (b, other) in product(enumerate(groups), repeat=2):
                if a != b and size > 1:
                    found = links(grouped.devices[a].name, grouped.devices[b].name)
                    assert (found.latency, found.bandwidth) == naive(cluster, one, other), seed
                    checked += 1
            for k, limit in enumerate(limits(grouped, model)):
                names = [device.name for device in grouped.devices[: k + 1]]
                lines = [line(model, links, name, names[-1]) for name in names[:-1]]
                assert limit.latency == max((x for x, _ in lines), default=0.0), seed
                assert limit.inverse_bandwidth == max((x for _, x in lines), default=0.0), seed
    assert checked > 1000


def test_work_does_not_grow_with_pairs_of_devices() -> None:
    """On 8,192 devices: far less than the 67 million pairs would take."""
    cluster = Cluster.parse("1024x8xh100")
    start = time.process_time()
    assert len(group_devices(cluster, 32).links) == 1
    limits(cluster, costmodels.find("auto", cluster))
    assert time.process_time() - start < 10


def test_placements_assume_counts_that_replicas_can_share() -> None:
    assert [find_even_count(rows, m) for rows, m in ((48, 32), (256, 48), (48, 24), (7, 9))] == [
        48, 64, 24, 7,
    ]  # fmt: skip
