"""Ops that were not measured: on a line between sizes that were, or from a single one."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from fxpart.costmodels.memory_traffic import traffic
from fxpart.costmodels.op_keys import scale
from fxpart.costmodels.op_time_estimator import BETWEEN, BEYOND, along
from fxpart.costmodels.profile_store import ContentionProfile
from fxpart.costmodels.roofline import Roofline
from hypothesis import given, settings
from hypothesis import strategies as st
from written_profiles import ahead, cluster, linear, measured

from fxpart.costs import OpSpec, TensorSpec

laws = settings(max_examples=50, deadline=None)
numbers = st.integers(1, 64)


@given(row=st.lists(numbers, min_size=1, max_size=4), factor=st.integers(2, 5), data=st.data())
@laws
def test_one_factor_between_sizes(row: list[int], factor: int, data: st.DataObject) -> None:
    """The oracle makes the other row itself."""
    places = data.draw(st.sets(st.integers(0, len(row) - 1), min_size=1))
    other = tuple(n * factor if i in places else n for i, n in enumerate(row))
    assert scale(other, tuple(row)) == (frozenset(places), Fraction(factor))
    assert scale(tuple(row), other) == (frozenset(places), Fraction(1, factor))
    assert scale(tuple(row), tuple(row)) is None


points = st.lists(
    st.tuples(st.integers(1, 99), st.floats(1e-6, 1)), min_size=2, max_size=5,
    unique_by=lambda point: point[0],
).map(sorted)  # fmt: skip


@given(row=points, at=st.integers(1, 99))
@laws
def test_lines_between_points(row: list[tuple[int, float]], at: int) -> None:
    exact = [(Fraction(x), y) for x, y in row]
    found = along(exact, Fraction(at))
    assert math.isfinite(found) and found >= 0
    above = next((i for i, (x, _) in enumerate(row) if x >= at), len(row) - 1)
    a, b = row[max(above, 1) - 1], row[max(above, 1)]
    if a[1] <= b[1]:
        wanted = a[1] + (b[1] - a[1]) * (at - a[0]) / (b[0] - a[0])
        assert found == pytest.approx(max(0.0, wanted))
    else:
        assert a[1] >= found >= b[1]


@pytest.mark.slow
@given(slope=st.floats(1e-6, 1e-3), start=st.floats(0, 1e-3), rows=st.integers(1, 200))
@settings(max_examples=15, deadline=None)
def test_what_grows_along_a_line_is_found_on_it(slope: float, start: float, rows: int) -> None:
    known = {ahead(linear(n)): start + slope * n for n in (8, 32, 64)}
    found = measured(known).op(linear(rows), cluster().devices[0], False)
    assert found.seconds == pytest.approx(1.5 * (start + slope * rows))
    if rows in (8, 32, 64):
        assert found.source == "measured"
    else:
        assert found.source == (BETWEEN if 8 <= rows <= 64 else BEYOND)


def test_one_size_that_is_known_twice_is_one_point() -> None:
    """Forms of meshes of different size have the same local tensors, and different keys."""

    def form(rows: int, ranks: int) -> OpSpec:
        part = TensorSpec((rows, 4), "float32")
        cut = (("0", ("dp",)), ("1", rows * ranks))
        return OpSpec("fxpart.collectives.cross_entropy_rows", (part,), (part,), cut, 1, (0,))

    known = {ahead(form(4, 2)): 4e-3, ahead(form(4, 4)): 6e-3, ahead(form(8, 2)): 10e-3}
    model = measured(known, cluster(1), None, {"x": ContentionProfile()})
    device = cluster(1).devices[0]
    assert model.op(form(6, 2), device, backward=False).seconds == pytest.approx(7.5e-3)
    assert model.op(form(4, 3), device, backward=False).seconds == pytest.approx(5e-3)
    assert model.op(form(16, 4), device, backward=False).seconds == pytest.approx(20e-3)


def test_other_sizes_are_not_mixed_up() -> None:
    """Between rows along rows; another width, two factors, is not used."""
    model = measured({ahead(linear(8)): 1.0, ahead(linear(32)): 2.0, ahead(linear(16, 128)): 9.0})
    device = cluster().devices[0]
    assert model.op(linear(16), device, False).seconds == pytest.approx(1.5 * (1 + 1 / 3))
    one = measured({ahead(linear(8)): 1.0}).op(linear(16), device, False)
    formula = Roofline()
    grows = formula.op(linear(16), device, False).seconds / formula.op(
        linear(8), device, False
    ).seconds  # fmt: skip
    assert one.source == BEYOND and one.seconds == pytest.approx(1.5 * grows)


def test_what_a_call_costs_whatever_its_size_is_not_multiplied() -> None:
    """One size of an op that takes far longer than its formula: more rows add what its class adds.

    Widths differ, so that neither op is on a line with the other.
    """
    device, formula = cluster().devices[0], Roofline()

    def alone(rows: int, width: int = 64) -> float:
        return formula.op(linear(rows, width), device, False).seconds

    small, large = 1000 * alone(8), 2 * alone(4096, 128)
    model = measured({ahead(linear(8)): small, ahead(linear(4096, 128)): large})
    rate = (small + large) / (alone(8) + alone(4096, 128))
    for rows in (4, 16, 64):
        wanted = small + rate * (alone(rows) - alone(8))
        found = model.op(linear(rows), device, False)
        assert found.source == BEYOND and found.seconds == pytest.approx(1.5 * wanted)
        assert found.seconds < 1.1 * 1.5 * small


def dropout(rows: int, of: int = 0) -> OpSpec:
    """On so many rows, of as many or more that are drawn."""
    part = TensorSpec((rows, 16), "float32")
    whole: tuple[tuple[str, object], ...] = (("random_shard", (of, 16)),) if of else ()
    return OpSpec("aten.dropout.default", (part,), (part,), (("1", 0.1), ("2", True), *whole), 1)


def attention(rows: int, of: int = 0, keys: int = 32) -> OpSpec:
    """With dropout of its weights: 8 queries, values of width 4."""
    query, key = (TensorSpec((rows, 2, n, 4), "float32") for n in (8, keys))
    whole: tuple[tuple[str, object], ...] = (("random_shard", (of, 2, 8, 4)),) if of else ()
    name = "aten.scaled_dot_product_attention.default"
    return OpSpec(name, (query, key, key), (query,), (("4", 0.1), *whole), 3)


@pytest.mark.slow
@given(
    start=st.floats(0, 1e-4), own=st.floats(1e-9, 1e-7), draw=st.floats(1e-9, 1e-7),
    rows=st.integers(1, 64), ranks=st.integers(2, 8), seen=st.tuples(numbers, st.integers(2, 4)),
)  # fmt: skip
@laws
def test_numbers_of_other_ranks_are_drawn_too(
    start: float, own: float, draw: float, rows: int, ranks: int, seen: tuple[int, int]
) -> None:
    """Truth: a call, each number of the part, each number that is drawn; one part was measured."""

    def took(part: int, whole: int) -> float:
        return start + own * 16 * part + draw * 16 * whole

    known = {ahead(dropout(n)): took(n, n) for n in (8, 32)}
    known[ahead(dropout(seen[0], seen[0] * seen[1]))] = took(seen[0], seen[0] * seen[1])
    model, device = (
        measured(known, cluster(1), None, {"x": ContentionProfile()}),
        cluster(1).devices[0],
    )
    found = model.op(dropout(rows, rows * ranks), device, False)
    assert found.seconds == pytest.approx(took(rows, rows * ranks))
    assert found.source in (BEYOND, "measured")


def test_draws_that_were_never_measured_in_parts() -> None:
    """By ops that do little else than draw; an attention draws a number for each weight."""
    known = {ahead(dropout(8)): 8 * 16 * 2e-8, ahead(dropout(16)): 16 * 16 * 2e-8}
    known |= {ahead(attention(n)): n * 1e-4 for n in (2, 4)}
    model, device = (
        measured(known, cluster(1), None, {"x": ContentionProfile()}),
        cluster(1).devices[0],
    )
    assert model.op(dropout(4, 12), device, False).seconds == pytest.approx(12 * 16 * 2e-8)
    more = 8 * (2 * 8 * 32) * 2e-8  # rows of others, of heads x queries x keys
    found = model.op(attention(4, 12), device, False)
    assert found.seconds == pytest.approx(4e-4 + more)
    bare = measured({ahead(attention(2)): 1e-4}, cluster(1), None, {"x": ContentionProfile()})
    assert bare.op(attention(2, 4), device, False).source == Roofline().op(
        attention(2, 4), device, False
    ).source  # fmt: skip


def test_the_formula_counts_what_is_drawn_for_others() -> None:
    """Written whole, and read to be cut; the backward knows nothing of it."""
    more = 2 * 4 * (12 - 4) * 16
    assert traffic(dropout(4, 12)) == traffic(dropout(4)) + more
    assert traffic(dropout(4, 12), backward=True) == traffic(dropout(4), backward=True)
