"""Collectives and transfers: the worked numbers, closed forms, and what placements cost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from fxpart.costmodels import alphabeta as ab
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster.devices import Link
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

MIB = 1 << 20
Formula = Callable[..., float]


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


@given(st.integers(2, 4), st.integers(1, 4))
def test_pieces_that_processors_send_directly_share_a_card(hosts: int, each: int) -> None:
    """Counted message by message: what leaves a host, against what a ring's link carries."""
    n, size = hosts * each, 1.2e9
    host_of = [rank // each for rank in range(n)]
    kinds = ["net" if host_of[r] != host_of[(r + 1) % n] else "shm" for r in range(n)]
    links = tuple(
        Link(source=f"d{r}", target=f"d{(r + 1) % n}", latency=0.0, bandwidth=1e9, kind=kind,
             shared=kind == "net")
        for r, kind in enumerate(kinds)
    )  # fmt: skip
    left = sum(size / n for a in range(n) for b in range(n) if host_of[a] == 0 != host_of[b])
    around = (n - 1) / n * size
    wanted = left if each > 1 else around  # a ring of cards alone may be one of GPUs
    for source, target, part in (("shard(0)", "replicate", 1), ("partial", "shard(0)", 1),
                                 ("shard(0)", "shard(1)", n)):  # fmt: skip
        found = ab.reshard(source, target, size, links).seconds
        assert found == pytest.approx(wanted / part / 1e9)
    alone = tuple(Link(source=x.source, target=x.target, latency=0.0, bandwidth=1e9, kind=x.kind)
                  for x in links)  # fmt: skip
    assert ab.reshard("shard(0)", "replicate", size, alone).seconds == pytest.approx(around / 1e9)


def test_other_formulas_by_hand() -> None:
    size, b = 1e6, 1e-9
    assert ab.all_gather(8, 2, size, b) * 1e6 == pytest.approx(8.4 + 6 * 3.4 + 9.6 + 875)
    assert ab.reduce_scatter(8, 2, size, b) == ab.all_gather(8, 2, size, b)
    assert ab.all_to_all(4, 1, size, b) * 1e6 == pytest.approx(8.4 + 3 * 3.4 + 187.5)
    assert ab.send(size, b, inter=False) * 1e6 == pytest.approx(8.4 + 3.4 + 1000)
    assert ab.send(size, b, inter=True, hops=2) * 1e6 == pytest.approx(8.4 + 9.6 + 20 + 1000)


# The formulas once more as the literature has them: microseconds, bytes, 1/(GB/s x 1000).
BASE, INTRA, INTER, SWITCH = 8.4, 3.4, 9.6, 10.0


def ring_text(n: int, m: int, size: float, per: float, h: int) -> float:
    return (
        BASE + 2 * (n - m) * INTRA + 2 * (m - 1) * (INTER + h * SWITCH)
        + 2 * (n - 1) / n * size * per
    )  # fmt: skip


def gather_text(n: int, m: int, size: float, per: float, h: int) -> float:
    return BASE + (n - m) * INTRA + (m - 1) * (INTER + h * SWITCH) + (n - 1) / n * size * per


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (ab.ring_all_reduce, ring_text),
        (ab.all_gather, gather_text),
        (ab.reduce_scatter, gather_text),
        (ab.all_to_all, lambda n, m, size, per, h: gather_text(n, m, size / n, per, h)),
    ],
)
@given(
    m=st.integers(1, 8), each=st.integers(1, 16), size=st.floats(0, 1e11),
    gigabytes=st.floats(0.1, 1000), hops=st.integers(0, 4),
)  # fmt: skip
def test_formulas_against_their_text(
    ours: Formula, text: Formula, m: int, each: int, size: float, gigabytes: float, hops: int
) -> None:
    expected = text(m * each, m, size, 1 / (gigabytes * 1000), hops)
    found = ours(m * each, m, size, beta(gigabytes), hops=hops)
    assert found * 1e6 == pytest.approx(expected)


@given(size=st.floats(0, 1e11), gigabytes=st.floats(0.1, 1000), hops=st.integers(0, 4))
def test_sends_against_their_text(size: float, gigabytes: float, hops: int) -> None:
    moved = size / (gigabytes * 1000)
    near = ab.send(size, beta(gigabytes), inter=False, hops=hops)
    far = ab.send(size, beta(gigabytes), inter=True, hops=hops)
    assert near * 1e6 == pytest.approx(BASE + INTRA + moved)
    assert far * 1e6 == pytest.approx(BASE + INTER + hops * SWITCH + moved)


def test_hops_count_between_machines_alone() -> None:
    """A switch is paid for once a step between machines: twice for a ring."""
    for formula, times in (
        (ab.ring_all_reduce, 2 * 3),
        (ab.all_gather, 3),
    ):
        near = formula(16, 1, 1e6, 1e-9, hops=3) - formula(16, 1, 1e6, 1e-9)
        far = formula(16, 4, 1e6, 1e-9, hops=3) - formula(16, 4, 1e6, 1e-9)
        assert near == 0 and far * 1e6 == pytest.approx(times * 3 * SWITCH)


def test_what_each_change_of_placement_calls() -> None:
    """Costs' table of placements: nothing for slices, else one collective each."""
    table = {
        ("replicate", "shard(0)"): None, ("replicate", "partial"): None,
        ("shard(0)", "partial"): None, ("shard(0)", "shard(0)"): None,
        ("shard(0)", "replicate"): "all_gather", ("partial", "replicate"): "all_reduce",
        ("partial", "shard(1)"): "reduce_scatter", ("shard(0)", "shard(1)"): "all_to_all",
    }  # fmt: skip
    for pair, operation in table.items():
        assert ab.operation(*pair) == operation
        assert (ab.reshard(*pair, 1e6, ring(4)).seconds > 0) == (operation is not None)


def test_an_uneven_cut_costs_its_own_bytes() -> None:
    """10 rows over 4 ranks: an all-gather brings each what others have, 3/4 of it on average."""
    rows = [3, 3, 2, 2]
    missing = sum(10 - mine for mine in rows) / 4
    assert ab.reshard("shard(0)", "replicate", 10.0, ring(4)).bytes == missing


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
    one_card = tuple(msgspec.structs.replace(x, shared=True) if x.kind == "net" else x for x in far)
    cost = ab.reshard("partial", "replicate", 4 * MIB, one_card)
    assert cost.seconds * 1e6 == pytest.approx(374.23, abs=0.005)
    # a card for each of a host's 4 ranks: 4 rings at once, 96 of the 100 GB/s within a host; a tree
    rails = ab.reshard("partial", "replicate", 4 * MIB, far)
    assert rails.seconds == pytest.approx(ab.tree_all_reduce(8, 2, 4 * MIB, beta(96)))
    large = ab.reshard("shard(0)", "replicate", 4e9, far)
    assert large.seconds == pytest.approx(ab.all_gather(8, 2, 4e9, beta(96)))


def test_small_all_reduce_of_two_hosts() -> None:
    """16 ranks on 2 hosts took 47 us for 512 bytes (NCCL issue 1244, 16 H20 and 16 ConnectX-7)."""
    assert ab.tree_all_reduce(16, 2, 512, beta(400)) == pytest.approx(47e-6, rel=0.05)


@pytest.mark.parametrize(("hosts", "published"), [(2, 90e9), (4, 61e9)])
def test_rows_of_experts_between_hosts(hosts: int, published: float) -> None:
    """DeepEP with 8 H100 a host: 8,192 rows to 8 experts each, of 7,168 elements of 8 bits."""
    cluster = Cluster.parse(f"{hosts}x8xh100")
    near, far = (cluster.link("host0/gpu:0", f"host{h}/gpu:1") for h in (0, 1))
    size, ranks = 8192.0 * 8 * 7168, 8 * hosts
    links = (near,) * (ranks - hosts) + (far,) * hosts
    took = ab.reshard("shard(0)", "shard(1)", size * ranks, links).seconds
    assert size / took == pytest.approx(published, rel=0.05)
    shared = tuple(msgspec.structs.replace(x, shared=True) if x.kind == "net" else x for x in links)
    assert ab.reshard("shard(0)", "shard(1)", size * ranks, shared).seconds > 7 * took


@pytest.mark.parametrize(("ranks", "published"), [(2, 47.7e9), (8, 312.9e9)])
def test_each_pair_of_a_mesh_has_a_link(ranks: int, published: float) -> None:
    """All-reduce of 4 GiB on MI300X, bus bandwidth (ML Engineering)."""
    links = (Cluster.parse("8xmi300x").link("host0/gpu:0", "host0/gpu:1"),) * ranks
    took = ab.reshard("partial", "replicate", 4 * 1024 * MIB, links).seconds
    bus = 2 * (ranks - 1) / ranks * 4 * 1024 * MIB / took
    assert bus == pytest.approx(published, rel=0.1)


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


def test_a_tree_counts_the_latency_of_slow_links() -> None:
    """No all-reduce is faster than a message over its links."""
    links = tuple(Link(source="a", target="b", latency=30e-3, bandwidth=1e8) for _ in range(4))
    found = ab.reshard("partial", "replicate", 1 << 10, links)
    assert found.seconds > 30e-3
