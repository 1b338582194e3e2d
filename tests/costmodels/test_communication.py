"""Measured curves in place of formulas: exact at points, lines between, laws everywhere."""

from __future__ import annotations

import math

import msgspec
import pytest
from fxpart.costmodels import alphabeta, communication
from fxpart.costmodels.roofline import Roofline
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.devices import CollectiveCurve, Link
from fxpart.errors import FxpartError

SIZES = tuple(1024.0 * 4**i for i in range(8))
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CHANGES = {
    "all_reduce": ("partial", "replicate"),
    "all_gather": ("shard(0)", "replicate"),
    "reduce_scatter": ("partial", "shard(0)"),
    "all_to_all": ("shard(0)", "shard(1)"),
}
seconds = st.floats(1e-6, 1.0)
points = st.lists(
    st.tuples(st.floats(1.0, 1e9), seconds), min_size=1, max_size=8, unique_by=lambda p: p[0]
).map(lambda found: tuple(sorted(found)))
links = st.builds(
    Link, source=st.just("a"), target=st.just("b"), latency=st.floats(0, 1e-2),
    bandwidth=st.floats(1e6, 1e13), kind=st.sampled_from(["net", "shm"]),
    curve=st.one_of(st.just(msgspec.UNSET), points),
)  # fmt: skip
curves = st.builds(
    CollectiveCurve, operation=st.sampled_from(OPERATIONS), ranks=st.integers(2, 8),
    hosts=st.integers(1, 2), points=points, latency=st.floats(0, 1e-2),
    inverse_bandwidth=st.floats(0, 1e-6),
)  # fmt: skip
laws = settings(max_examples=150, deadline=None)


def ring(n: int, far: int = 0) -> tuple[Link, ...]:
    return tuple(
        Link(source=f"d{i}", target=f"d{i + 1}", latency=20e-6, bandwidth=1e9,
             kind="net" if i < far else "shm")
        for i in range(n)
    )  # fmt: skip


def curve(
    operation: str, ranks: int, hosts: int = 1, *, a: float = 1e-4, b: float = 2e-9
) -> CollectiveCurve:
    return CollectiveCurve(
        operation=operation, ranks=ranks, hosts=hosts, latency=a, inverse_bandwidth=b,
        points=tuple((s, a + b * s) for s in SIZES),
    )  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_measured_group_costs_what_was_measured(operation: str) -> None:
    model = Roofline(curves=tuple(curve(o, 2, b=i * 1e-9) for i, o in enumerate(OPERATIONS, 1)))
    slope = (1 + OPERATIONS.index(operation)) * 1e-9
    for size in (0.0, 1.0, 1024.0, 5e3, 3e6, 16 * 2.0**20, 1e9):
        cost = model.reshard(*CHANGES[operation], size, ring(2))
        assert cost.seconds == pytest.approx(1e-4 + slope * size)
        assert cost.bytes == alphabeta.reshard(*CHANGES[operation], size, ring(2)).bytes
        inside = SIZES[0] <= size <= SIZES[-1]
        assert cost.source == ("measured collective" + ("" if inside else " (fitted line)"))


def test_between_points_a_line_and_beyond_the_fitted_one() -> None:
    link = Link(
        source="a", target="b", latency=1e-5, bandwidth=1e9,
        curve=((100.0, 2e-5), (200.0, 4e-5), (400.0, 5e-5)),
    )  # fmt: skip
    for size, expected in (
        (0, 1e-5), (50, 1.5e-5), (100, 2e-5), (150, 3e-5), (300, 4.5e-5), (400, 5e-5),
        (1400, 5e-5 + 1e-6),
    ):  # fmt: skip
        assert communication.transfer(size, link).seconds == pytest.approx(expected)


def test_a_group_of_other_size_is_scaled_and_says_so() -> None:
    """Twice the steps and the share of bytes as the ring's formula has them."""
    model = Roofline(curves=(curve("all_gather", 2),))
    cost = model.reshard("shard(0)", "replicate", 4e6, ring(4))
    alpha = alphabeta.RING
    steps = (alpha.base + 3 * alpha.intra) / (alpha.base + alpha.intra)
    assert cost.seconds == pytest.approx(1e-4 * steps + 2e-9 * 4e6 * (3 / 4) / (1 / 2))
    assert cost.source == "measured collective on 2 ranks, scaled to 4"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("n", "m"), [(3, 1), (4, 2), (8, 2)])
def test_scaling_goes_as_the_formula_does(operation: str, n: int, m: int) -> None:
    """A curve made by the formula itself for 2 ranks becomes the formula's for n on m machines."""
    formula = {
        "all_reduce": alphabeta.ring_all_reduce, "all_gather": alphabeta.all_gather,
        "reduce_scatter": alphabeta.reduce_scatter, "all_to_all": alphabeta.all_to_all,
    }[operation]  # fmt: skip
    k, beta = (2, 1e-9) if m > 1 else (1, 1e-9)
    known = [(s, formula(2, k, s, beta)) for s in SIZES]
    start = formula(2, k, 0.0, beta)
    made = CollectiveCurve(
        operation=operation, ranks=2, hosts=k, points=tuple(known), latency=start,
        inverse_bandwidth=(known[-1][1] - start) / SIZES[-1],
    )  # fmt: skip
    found, latency, slope = communication.scaled(made, n, m)
    for size, seconds in found:
        assert seconds == pytest.approx(formula(n, m, size, beta))
    assert latency + slope * 1e9 == pytest.approx(formula(n, m, 1e9, beta))


def test_the_closest_group_is_taken_and_only_of_the_same_kind() -> None:
    known = [curve("all_reduce", 2), curve("all_reduce", 4), curve("all_reduce", 8, 2)]
    assert communication.closest(known, "all_reduce", 4, 1) is known[1]
    assert communication.closest(known, "all_reduce", 3, 1) is known[0]
    assert communication.closest(known, "all_reduce", 16, 4) is known[2]
    assert communication.closest(known[:2], "all_reduce", 8, 2) is None
    assert communication.closest(known, "all_gather", 2, 1) is None
    cost = communication.reshard("partial", "replicate", 1e6, ring(4, far=2), known[:2])
    assert cost == alphabeta.reshard("partial", "replicate", 1e6, ring(4, far=2))


def test_an_unknown_placement_is_told_with_curves_as_without() -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        communication.reshard("shard", "replicate", 1.0, ring(2), (curve("all_gather", 2),))


@pytest.mark.slow
@given(points)
@laws
def test_rising_points_are_the_closest_that_rise(given_: communication.Points) -> None:
    """Against the max-min formula of isotonic regression: over starts, the largest least mean."""
    found = [seconds for _, seconds in communication.rising(given_)]
    logs = [math.log(seconds) for _, seconds in given_]
    for i, value in enumerate(found):
        best = max(
            min(sum(logs[a:b]) / (b - a) for b in range(i + 1, len(logs) + 1)) for a in range(i + 1)
        )
        assert math.log(value) == pytest.approx(best, abs=1e-9)
    assert found == sorted(found)
    if list(given_) == sorted(given_, key=lambda p: p[1]):
        assert found == [seconds for _, seconds in given_]


@pytest.mark.slow
@given(size=st.floats(0, 1e13), more=st.floats(0, 1e13), link=links, faster=st.floats(1, 100))
@laws
def test_laws_of_transfers(size: float, more: float, link: Link, faster: float) -> None:
    model = Roofline()
    cost = model.transfer(size, link)
    assert math.isfinite(cost.seconds) and cost.seconds >= 0 and cost.source
    assert cost == model.transfer(size, link)
    assert cost.seconds <= model.transfer(size + more, link).seconds * (1 + 1e-12)
    wider = msgspec.structs.replace(link, bandwidth=link.bandwidth * faster)
    assert model.transfer(size, wider).seconds <= cost.seconds


@pytest.mark.slow
@given(
    change=st.sampled_from(sorted(CHANGES.values())), size=st.floats(0, 1e13),
    more=st.floats(0, 1e13), group=st.lists(links, max_size=6).map(tuple),
    known=st.lists(curves, max_size=4).map(tuple), faster=st.floats(1, 100),
)  # fmt: skip
@laws
def test_laws_of_reshards(
    change: tuple[str, str], size: float, more: float, group: tuple[Link, ...],
    known: tuple[CollectiveCurve, ...], faster: float,
) -> None:  # fmt: skip
    model = Roofline(curves=known)
    cost = model.reshard(*change, size, group)
    assert math.isfinite(cost.seconds) and cost.seconds >= 0 and cost.source
    assert cost == Roofline(curves=known).reshard(*change, size, group)
    assert cost.seconds <= model.reshard(*change, size + more, group).seconds * (1 + 1e-12)
    wider = tuple(msgspec.structs.replace(x, bandwidth=x.bandwidth * faster) for x in group)
    assert model.reshard(*change, size, wider).seconds <= cost.seconds * (1 + 1e-12)
    for same in set(change):
        assert model.reshard(same, same, size, group).seconds == 0
