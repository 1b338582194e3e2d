"""Seats of a new plan: the fewest bytes move, against every way to seat them."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
import sample_plans
from hypothesis import given
from hypothesis import strategies as st

from fxpart.cluster.model import Cluster
from fxpart.elastic.available_cluster import adapt_cluster_to_ranks, remove_devices
from fxpart.elastic.device_reassignment import reassign_devices
from fxpart.elastic.state_shares import count_common_bytes, shares_of
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan

BLOCKS = 12
replace = msgspec.structs.replace


def cut(starts: list[int], cluster: Cluster, order: list[int] | None = None) -> Plan:
    """A plan of twelve blocks that begins its stages there; stage k on device ``order[k]``."""
    base = sample_plans.plan(len(starts), blocks=BLOCKS)
    used = sorted(order or range(len(starts)))
    ranks = [used.index(device) for device in order or used]
    ends = [*starts[1:], BLOCKS]
    stages = tuple(
        replace(
            stage, first=a, last=b - 1, ranks=(rank,), parameters=1000 * (b - a), zero=0
        )
        for stage, a, b, rank in zip(base.stages, starts, ends, ranks, strict=True)
    )  # fmt: skip
    rows = tuple(
        replace(row, ranks=(rank,)) for row, rank in zip(base.prediction.ranks, ranks, strict=True)
    )
    return replace(
        base,
        cluster=cluster,
        cluster_hash=cluster.hash,
        stages=stages,
        devices=() if used == list(range(len(used))) else tuple(used),
        prediction=replace(base.prediction, ranks=rows),
    ).validate()


def lacking(plan: Plan, old: Plan) -> float:
    """Bytes that the plan's devices do not have of it, counted block by block."""
    held = {old.device(s.ranks[0]).name: set(range(s.first, s.last + 1)) for s in old.stages}
    missing = 0
    for stage in plan.stages:
        there = held.get(plan.device(stage.ranks[0]).name, set())
        missing += len(set(range(stage.first, stage.last + 1)) - there)
    return 12_000.0 * missing


def test_the_lost_ones_replacement_takes_its_place() -> None:
    four = sample_plans.cluster(4)
    old = cut([0, 3, 6, 9], four)
    new_name = [replace(d, name="host0/cpu:9") if i == 1 else d for i, d in enumerate(four.devices)]
    # The new device comes last, as a machine does that was added.
    mended = replace(four, devices=(new_name[0], *new_name[2:], new_name[1]))
    found = reassign_devices(cut([0, 3, 6, 9], mended), old)
    names = [found.plan.device(s.ranks[0]).name for s in found.plan.stages]
    assert names == ["host0/cpu:0", "host0/cpu:9", "host0/cpu:2", "host0/cpu:3"]
    assert found.moved == pytest.approx(3 * 12_000, abs=1)
    assert [found.plan.device(rank).name for rank in found.ranks] == ["host0/cpu:9"]
    assert found.before == pytest.approx(9 * 12_000, abs=1)


def test_the_same_plan_again_moves_nothing() -> None:
    old = cut([0, 3, 6, 9], sample_plans.cluster(4), [2, 0, 3, 1])
    found = reassign_devices(cut([0, 3, 6, 9], sample_plans.cluster(4)), old)
    assert found.moved == pytest.approx(0.0, abs=1) and found.ranks == ()
    assert [s.ranks for s in found.plan.stages] == [s.ranks for s in old.stages]


def test_nothing_is_known_of_another_model() -> None:
    old = cut([0, 6], sample_plans.cluster(2))
    other = replace(old, model=replace(old.model, fingerprint="1" * 64))
    for before in (None, other):
        found = reassign_devices(old, before)
        assert found.plan is old and found.ranks == (0, 1)
        assert found.moved == found.before == pytest.approx(144_000, abs=1)


_CUTS = st.integers(1, 4).flatmap(
    lambda count: st.sets(st.integers(1, BLOCKS - 1), min_size=count - 1, max_size=count - 1)
)


@pytest.mark.slow
@given(_CUTS, _CUTS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_way_to_seat_moves_less(
    before: set[int], after: set[int], lost: int, random: object
) -> None:
    four = sample_plans.cluster(4)
    order = list(range(len(before) + 1))
    random.shuffle(order)  # type: ignore[attr-defined]
    old = cut([0, *sorted(before)], four, order)
    left = remove_devices(four, {f"host0/cpu:{lost}"})
    starts = [0, *sorted(after)][: len(left.devices)]
    new = cut(starts, left)
    found = reassign_devices(new, old)
    found.plan.validate()
    assert found.moved == pytest.approx(lacking(found.plan, old), abs=1)
    least = min(
        lacking(cut(starts, left, list(places)), old)
        for places in permutations(range(len(left.devices)), len(starts))
    )
    assert found.moved == pytest.approx(least, abs=1)
    assert found.moved <= found.before + 1
    # What the plan decides and costs is as it was.
    assert [(s.first, s.last) for s in found.plan.stages] == [(s.first, s.last) for s in new.stages]
    assert found.plan.prediction.step_seconds == new.prediction.step_seconds


def hosts(*names: str) -> Cluster:
    """Two devices on each host, one network."""
    one = sample_plans.cluster(1)
    devices = tuple(
        replace(one.devices[0], name=f"{host}/cpu:{i}", host=host) for host in names for i in (0, 1)
    )
    return replace(one, name="hosts", devices=devices)


def test_whole_hosts_are_exchanged_and_stages_of_one_stay_together() -> None:
    old = cut([0, 3, 6, 9], hosts("a", "b"))
    new = cut([0, 3, 6, 9], hosts("b", "c"))
    found = reassign_devices(new, old)
    where = [found.plan.device(s.ranks[0]).host for s in found.plan.stages]
    assert where == ["c", "c", "b", "b"]
    assert found.moved == pytest.approx(6 * 12_000, abs=1)


def test_unlike_devices_are_not_exchanged() -> None:
    four = sample_plans.cluster(4)
    fast = replace(four, devices=(replace(four.devices[0], bandwidth=2e10), *four.devices[1:]))
    old = cut([0, 3, 6, 9], fast, [1, 0, 2, 3])
    found = reassign_devices(cut([0, 3, 6, 9], fast), old)
    assert found.plan.device(found.plan.stages[0].ranks[0]).name == "host0/cpu:0"
    assert found.moved == found.before


def test_shares_of_tensor_parallel_lanes_and_zero() -> None:
    base = cut([0], sample_plans.cluster(4))
    stage = replace(
        base.stages[0], ranks=(0, 1, 2, 3), data_parallel=2, tensor_parallel=2, zero=1
    )  # fmt: skip
    wide = replace(base, stages=(stage,))
    shares = shares_of(wide)
    whole = shares_of(base)[0].bytes
    # Half the parameters (a third of all bytes) and a quarter of the optimizer's state.
    assert [s.bytes / whole for s in shares] == pytest.approx([1 / 6 + 1 / 6] * 4)
    # Lanes 0 and 2 are the replicas of the first half: the same parameters, other slots.
    assert count_common_bytes(shares[0], shares[2]) == pytest.approx(whole / 6)
    assert count_common_bytes(shares[0], shares[1]) == 0.0
    # All optimizer state once, all parameters twice.
    assert sum(s.bytes for s in shares) == pytest.approx(whole * (2 / 3 + 2 / 3))


def test_what_is_left_of_a_cluster() -> None:
    both = replace(
        hosts("a", "b"),
        links=(
            *sample_plans.cluster(1).links,
            replace(sample_plans.cluster(1).links[0], source="a", target="a"),
            replace(sample_plans.cluster(1).links[0], source="b", target="a/cpu:1"),
        ),
    )
    left = remove_devices(both, {"a/cpu:1"})
    assert [d.name for d in left.devices] == ["a/cpu:0", "b/cpu:0", "b/cpu:1"]
    assert [n.source for n in left.links] == ["*", "a"]
    alone = remove_devices(both, {"a"})
    assert [d.name for d in alone.devices] == ["b/cpu:0", "b/cpu:1"]
    assert [n.source for n in alone.links] == ["*"]
    assert left.validate() is left and left.hash != both.hash
    assert remove_devices(both, {"c"}) is both
    with pytest.raises(FxpartError, match="FXP519"):
        remove_devices(both, {"a", "b"})


def test_the_cluster_for_so_many_ranks(tmp_path: object) -> None:
    assert adapt_cluster_to_ranks("auto", 3).hash == Cluster.local(3).hash
    assert len(adapt_cluster_to_ranks("local:4", 3).devices) == 4
    assert len(adapt_cluster_to_ranks("local:4", 3, {"local/cpu:0"}).devices) == 3
    with pytest.raises(FxpartError, match="2 devices are left, but 3 ranks"):
        adapt_cluster_to_ranks("local:4", 3, {"local/cpu:0", "local/cpu:2"})
