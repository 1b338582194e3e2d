"""Collectives and transfers: the worked numbers, closed forms, and what placements cost."""

from __future__ import annotations

import pytest
from fxpart.costmodels import alphabeta as ab
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster import Link
from fxpart.errors import FxpartError

MIB = 1 << 20


def beta(gigabytes: float) -> float:
    return 1 / (gigabytes * 1e9)


def ring(n: int, **changes: float) -> tuple[Link, ...]:
    fields: dict[str, float] = {"latency": 11.8e-6, "bandwidth": 1e11}
    return tuple(
        Link(source=f"d{i}", target=f"d{(i + 1) % n}", kind="nvlink", **(fields | changes))
        for i in range(n)
    )


def test_worked_numbers() -> None:
    """8 ranks on 2 machines at 24 GB/s, and 4 on one at 235 GB/s, 4 MiB each: microseconds."""
    assert ab.ring_all_reduce(8, 2, 4 * MIB, beta(24)) * 1e6 == pytest.approx(374.23, abs=0.005)
    assert ab.ring_all_reduce(4, 1, 4 * MIB, beta(235)) * 1e6 == pytest.approx(55.57, abs=0.005)


def test_other_formulas_by_hand() -> None:
    size, b = 1e6, 1e-9
    assert ab.tree_all_reduce(8, 2, size, b) * 1e6 == pytest.approx(2 * 3 * 28 + 28 + 2000)
    assert ab.all_gather(8, 2, size, b) * 1e6 == pytest.approx(8.4 + 6 * 3.4 + 9.6 + 875)
    assert ab.reduce_scatter(8, 2, size, b) == ab.all_gather(8, 2, size, b)
    assert ab.all_to_all(4, 1, size, b) * 1e6 == pytest.approx(8.4 + 3 * 3.4 + 187.5)
    assert ab.send(size, b, inter=False) * 1e6 == pytest.approx(8.4 + 3.4 + 1000)
    assert ab.send(size, b, inter=True, hops=2) * 1e6 == pytest.approx(8.4 + 9.6 + 20 + 1000)


def test_transfer_of_nothing_takes_the_latency() -> None:
    (link, *_) = ring(2)
    assert ab.transfer(0, link).seconds == link.latency
    assert ab.transfer(1e9, link).seconds == pytest.approx(link.latency + 0.01)


def test_reshard_kinds() -> None:
    links, size = ring(4), 4e6
    for free in (("shard(0)",) * 2, ("replicate", "shard(1)"), ("replicate", "partial")):
        assert ab.reshard(*free, size, links).seconds == 0
    assert ab.reshard("shard(0)", "replicate", size, links[:1]).seconds == 0
    reduced = ab.reshard("partial", "replicate", size, links)
    assert reduced.seconds == pytest.approx(ab.ring_all_reduce(4, 1, size, beta(100)))
    assert reduced.bytes == pytest.approx(1.5 * size)
    gathered = ab.reshard("shard(0)", "replicate", size, links)
    scattered = ab.reshard("partial", "shard(0)", size, links)
    assert gathered.seconds + scattered.seconds == pytest.approx(reduced.seconds + ab.RING.base)
    moved = ab.reshard("shard(0)", "shard(1)", size, links)
    assert moved.bytes == pytest.approx(gathered.bytes / 4)


def test_links_between_hosts_count_as_such() -> None:
    near = ring(8)
    far = tuple(
        Link(source=x.source, target=x.target, latency=18e-6, bandwidth=24e9, kind="net")
        if i % 4 == 3
        else x
        for i, x in enumerate(near)
    )
    cost = ab.reshard("partial", "replicate", 4 * MIB, far)
    assert cost.seconds * 1e6 == pytest.approx(374.23, abs=0.005)


def test_unknown_placement() -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        ab.reshard("shard", "replicate", 1.0, ring(2))


@given(st.integers(1, 64), st.integers(1, 8), st.floats(0, 1e12), st.integers(0, 4))
def test_ring_moves_what_gather_and_scatter_move(n: int, m: int, size: float, hops: int) -> None:
    """An all-reduce is a reduce-scatter and an all-gather that start together."""
    b, m = 1e-10, min(n, m)
    halves = ab.reduce_scatter(n, m, size, b, hops=hops) + ab.all_gather(n, m, size, b, hops=hops)
    whole = ab.ring_all_reduce(n, m, size, b, hops=hops)
    assert whole == pytest.approx(halves - ab.RING.base)
