"""Costs from a profile: keys, classes, what was measured, what lies between, what is missing."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import msgspec
import pytest
from fxpart.costmodels import Measured, find
from fxpart.costmodels.classes import CLASSES, op_class
from fxpart.costmodels.estimates import BETWEEN, BEYOND, along
from fxpart.costmodels.opkeys import family, op_key, parse_key, scale
from fxpart.costmodels.roofline import Roofline
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import ZOO
from zoo_graphs import captured, prepared

from fxpart.cluster import Cluster, Device, Host
from fxpart.costs import OpSpec, TensorSpec
from fxpart.pricing.groups import grouped
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes, Split
from fxpart.profile import (
    Calibration,
    Crowding,
    Profile,
    Rehearsal,
    Setting,
    StageTiming,
    Timing,
    chip,
)

HERE = Setting(device="cpu", chip=chip(), threads=1, torch="2.11.0")
laws = settings(max_examples=50, deadline=None)
numbers = st.integers(1, 64)
sizes = st.lists(numbers, max_size=3).map(tuple)
tensors = st.builds(
    TensorSpec, sizes, st.sampled_from(["float32", "int64"]), st.sampled_from(["", "1.0", "0x2.1"])
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 1) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@st.composite
def ops(draw: st.DrawFn) -> OpSpec:
    inputs = tuple(draw(st.lists(tensors, max_size=3)))
    wanted = tuple(i for i in range(len(inputs)) if draw(st.booleans()))
    return OpSpec(
        draw(st.sampled_from(["aten.mul.Tensor", "aten.sum.default", "aten.view.default"])),
        inputs,
        tuple(draw(st.lists(tensors, min_size=1, max_size=2))),
        tuple(draw(st.lists(st.tuples(st.sampled_from("23"), values), max_size=2))),
        len(wanted),
        wanted,
    )


def linear(rows: int, width: int = 64) -> OpSpec:
    """x [rows, 64] times w [width, 64]."""
    x, w, y = ((rows, 64), (width, 64), (rows, width))
    tensors_ = [TensorSpec(shape, "float32") for shape in (x, w, y)]
    return OpSpec("aten.linear.default", (tensors_[0], tensors_[1]), (tensors_[2],), (), 2, (0, 1))


@cache
def local(ranks: int) -> Cluster:
    return Cluster.local(ranks)


def cluster(ranks: int = 2, **changes: object) -> Cluster:
    devices = tuple(msgspec.structs.replace(d, threads=1) for d in local(ranks).devices)
    return msgspec.structs.replace(local(ranks), devices=devices, **changes)


def measured(
    ops_: Mapping[str, float],
    on: Cluster | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    crowding: Mapping[str, Crowding] | None = None,
) -> Measured:
    """A model of a profile with these seconds by key and direction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.profile"
        with Profile(path, create=True) as profile:
            profile.put("ops", HERE, {k: Timing(s, s, s, 5) for k, s in ops_.items()})
            profile.put("calibrations", HERE, calibrations or {})
            profile.put("crowding", HERE, crowding or {"": Crowding(slowdown=(1.0, 1.5))})
        found = find(path, on or cluster())
    assert isinstance(found, Measured)
    return found


def ahead(op: OpSpec) -> str:
    return f"{op_key(op)} forward"


@given(op=ops())
@laws
def test_a_key_is_the_op(op: OpSpec) -> None:
    again = parse_key(op_key(op))
    assert op_key(again) == op_key(op)
    assert (again.name, again.inputs, again.outputs) == (op.name, op.inputs, op.outputs)
    assert [again.needs(i) for i in range(len(op.inputs))] == [
        op.needs(i) for i in range(len(op.inputs))
    ]
    assert family(again)[1] == family(op)[1]


@given(one=ops(), other=ops())
@laws
def test_equal_keys_mean_equal_ops(one: OpSpec, other: OpSpec) -> None:
    if op_key(one) == op_key(other):
        assert (one.name, one.inputs, one.outputs) == (other.name, other.inputs, other.outputs)
        assert family(one) == family(other)


def test_keys_leave_out_what_settings_and_results_say() -> None:
    spec = OpSpec("aten.zeros.default", (), (TensorSpec((2, 3), "float32"),))
    more = (("0", (2, 3)), ("device", "cpu"), ("pin_memory", False))
    assert op_key(replace(spec, attributes=more)) == op_key(spec)
    assert op_key(replace(spec, attributes=(("dtype", "torch.float64"),))) != op_key(spec)


def test_gradients_by_number_and_by_position_are_one_key() -> None:
    op = linear(4)
    assert op_key(op) == op_key(replace(op, gradient_inputs=()))


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
    model = measured(known, cluster(1), None, {"x": Crowding()})
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


def test_seconds_are_alone_times_factor_times_crowd() -> None:
    calibrations = {"": Calibration(factors={"matmul forward": 1.2, "matmul backward": 0.5})}
    both = {ahead(linear(8)): 1e-3, f"{op_key(linear(8))} backward": 3e-3}
    model = measured(both, calibrations=calibrations)
    device = cluster().devices[0]
    assert model.op(linear(8), device, False).seconds == pytest.approx(1e-3 * 1.2 * 1.5)
    assert model.op(linear(8), device, True).seconds == pytest.approx(3e-3 * 0.5 * 1.5)
    four = measured(both, cluster(4), calibrations)
    assert four.full(cluster(4).devices[0]) == pytest.approx(3.0)  # past the curve, in proportion
    assert model.op(replace(linear(8), gradients=0, gradient_inputs=()), device, True).seconds == 0


def held(*quotas: float) -> Cluster:
    """Ranks of one host under quotas."""
    devices = [
        msgspec.structs.replace(d, quota=quota)
        for d, quota in zip(cluster(len(quotas)).devices, quotas, strict=True)
    ]
    return msgspec.structs.replace(cluster(len(quotas)), devices=tuple(devices))


def test_a_quota_lengthens_what_a_processor_takes() -> None:
    """And a rank under one slows others down by its share: three of 1.5 cores are no crowd of 3."""
    known = {ahead(linear(8)): 1e-3}
    on = held(0.75, 0.5, 0.25)
    model = measured(known, on)
    slowed = 1.25  # half between one rank and two
    for device in on.devices:
        assert model.full(device) == pytest.approx(slowed / device.share)
        seconds = model.op(linear(8), device, False).seconds
        assert seconds == pytest.approx(1e-3 * slowed / device.share)
    (group,) = grouped(held(0.75, 0.25), 2).devices
    assert group.name == on.devices[0].name and group.share == 0.25
    assert model.op(linear(8), group, False).seconds == pytest.approx(1e-3 * slowed / 0.25)
    assert measured(known, held(4.0, 1.0)).full(cluster().devices[0]) == 1.5


def test_any_call_takes_something_more_within_a_stage() -> None:
    """So many times 3 us a call, also where nothing of the op was measured; backward by itself."""
    factors = {"matmul forward": 1.25, "calls forward": 2.0, "calls backward": 0.5}
    both = {ahead(linear(8)): 1e-3, f"{op_key(linear(8))} backward": 3e-3}
    model = measured(both, calibrations={"": Calibration(factors=factors)})
    device = cluster().devices[0]
    assert model.op(linear(8), device, False).seconds == pytest.approx(1.5 * (1.25e-3 + 6e-6))
    assert model.op(linear(8), device, True).seconds == pytest.approx(1.5 * (3e-3 + 1.5e-6))
    other = replace(linear(8, 33), name="aten.mm.default")
    nothing = measured({}, calibrations={"": Calibration(factors={"calls forward": 1.0})})
    formula = Roofline().op(other, device, False).seconds
    assert nothing.op(other, device, False).seconds == pytest.approx(formula + 1.5 * 3e-6)
    assert model.op(replace(linear(8), gradients=0, gradient_inputs=()), device, True).seconds == 0


def test_unknown_ops_are_priced_by_formula_as_their_class_was_measured() -> None:
    device = cluster().devices[0]
    formula = Roofline()
    other = replace(linear(8, 33), name="aten.mm.default")
    base = formula.op(other, device, False)
    nothing = measured({}, calibrations={"": Calibration(factors={"matmul forward": 2.0})})
    found = nothing.op(other, device, False)
    assert found.source == "roofline" and found.seconds == pytest.approx(2 * base.seconds)
    alone = formula.op(linear(8), device, False).seconds * 7
    model = measured({ahead(linear(8)): alone})
    found = model.op(other, device, False)
    assert found.source == "roofline" and found.seconds == pytest.approx(7 * 1.5 * base.seconds)


def test_a_models_own_calibration_and_crowding_come_first() -> None:
    calibrations = {
        name: Calibration(factors={"matmul forward": factor})
        for name, factor in (("a", 2.0), ("b", 3.0))
    }
    crowding = {"a": Crowding(slowdown=(1.0, 2.0)), "": Crowding(slowdown=(1.0, 1.0))}
    model = measured({ahead(linear(8)): 1.0}, None, calibrations, crowding)
    device = cluster().devices[0]
    assert model.of("a").op(linear(8), device, False).seconds == pytest.approx(4.0)
    assert model.of("b").op(linear(8), device, False).seconds == pytest.approx(3.0)
    # of two models' factors none is that of a third
    assert model.of("c").calibration == Calibration()
    assert model.of("c").crowding("local").slowdown == (1.0, 1.0)


def test_a_hosts_own_curve_where_the_profile_has_none() -> None:
    hosts = (Host(name="local", cores=2, slowdown=(1.0, 1.8)),)
    model = measured({ahead(linear(8)): 1.0}, cluster(hosts=hosts), None, {"x": Crowding()})
    assert model.of("y").full(cluster().devices[0]) in (1.0, 1.8)
    with tempfile.TemporaryDirectory() as folder:
        with Profile(Path(folder) / "a.db", create=True) as profile:
            profile.put("ops", HERE, {"x": Timing(1.0, 1.0, 1.0, 1)})
        found = find(Path(folder) / "a.db", cluster(hosts=hosts))
    assert isinstance(found, Measured) and found.full(cluster().devices[0]) == 1.8


def test_stages_and_links() -> None:
    timing = Timing(1.0, 1.0, 1.0, 3)
    stage = StageTiming(forward=timing, backward=timing, optimizer=timing, rows=2)
    with tempfile.TemporaryDirectory() as folder:
        with Profile(Path(folder) / "a.db", create=True) as profile:
            profile.put("stages", HERE, {"s": stage})
        found = find(Path(folder) / "a.db", cluster())
    assert isinstance(found, Measured)
    assert found.stage("s") == stage and found.stage("t") is None
    links = cluster().links
    assert found.transfer(1e6, links[0]) == Roofline().transfer(1e6, links[0])
    assert found.reshard("partial", "replicate", 1e6, links * 2) == Roofline().reshard(
        "partial", "replicate", 1e6, links * 2
    )


def test_ranks_that_meet_in_a_collective() -> None:
    """What was measured of meeting is added to every collective of a host, and to nothing else."""
    meets = {"": Crowding(slowdown=(1.0, 1.5), meet=(1e-3, 2e-3))}
    model, links = measured({}, cluster(4), None, meets), cluster(4).links
    total = ("partial", "replicate", 1e6)
    for ranks, later in ((2, 1e-3), (3, 2e-3), (4, 2e-3)):
        ring = links[:1] * ranks
        free = Roofline().reshard(*total, ring).seconds
        assert model.reshard(*total, ring).seconds == pytest.approx(free + later)
    assert model.reshard("replicate", "shard(0)", 1e6, links[:1] * 2).seconds == 0.0
    assert model.transfer(1e6, links[0]) == Roofline().transfer(1e6, links[0])
    far = tuple(msgspec.structs.replace(link, kind="net") for link in links[:1] * 2)
    assert model.reshard(*total, far) == Roofline().reshard(*total, far)


def test_what_ran_on_one_host_says_nothing_of_several() -> None:
    timing = Timing(1.0, 1.0, 1.0, 3)
    known = Rehearsal(seconds=timing, label="", model="", predicted=2.0)
    one, far = cluster(), cluster().devices[1]
    apart = msgspec.structs.replace(
        one, devices=(one.devices[0], msgspec.structs.replace(far, host="far"))
    )
    with tempfile.TemporaryDirectory() as folder:
        with Profile(Path(folder) / "a.db", create=True) as profile:
            profile.put("rehearsals", HERE, {"k": known})
        here, there, slow = (
            find(Path(folder) / "a.db", where) for where in (one, apart, held(1.0, 0.5))
        )
    assert isinstance(here, Measured) and isinstance(there, Measured)
    assert isinstance(slow, Measured) and slow.rehearsal("k") is None and slow.rehearsed("") == ()
    assert here.rehearsal("k") == known and here.rehearsal("other") is None
    assert there.rehearsal("k") is None


@cache
def twice() -> tuple[Measured, Measured]:
    """One profile, read twice."""
    known = {ahead(linear(8)): 1e-3, "not a key forward": 1.0, '["x"] forward': 1.0}
    return measured(known), measured(known)


@given(op=ops(), backward=st.booleans())
@laws
def test_costs_are_sound_and_equal_twice(op: OpSpec, backward: bool) -> None:
    model, device = twice()[0], cluster().devices[0]
    cost = model.op(op, device, backward)
    assert all(math.isfinite(v) and v >= 0 for v in (cost.seconds, cost.bytes, cost.flops))
    assert cost.source and cost == model.op(op, device, backward)
    assert cost == twice()[1].op(op, device, backward)


def roofline_seconds(spec: OpSpec, device: Device) -> float:
    return sum(Roofline().op(spec, device, back).seconds for back in (False, True))


@pytest.mark.parametrize("name", sorted(n for n, e in ZOO.items() if e.available))
@pytest.mark.slow
def test_little_time_is_of_no_class(name: str) -> None:
    """By the formula's seconds, over all ops of a model."""
    made = captured(name)
    specs = Specs(made.parameters)
    rows = Sizes(made, Split(made.batch_size, 1))
    seconds: Counter[str] = Counter()
    device = Cluster.local(1).devices[0]
    for node in prepared(name).graph.nodes:
        if (op := specs.op(node)) is not None:
            kind = op_class(rows.op(op))
            assert kind in CLASSES
            seconds[kind] += roofline_seconds(rows.op(op), device)  # type: ignore[assignment]
    assert seconds["other"] <= 0.02 * sum(seconds.values()), seconds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.linear.default", "matmul"),
        ("aten.conv_transpose2d.input", "convolution"),
        ("aten.scaled_dot_product_attention.default", "attention"),
        ("aten.relu_.default", "pointwise"),
        ("aten.softmax.int", "normalisation"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.embedding_bag.padding_idx", "embedding"),
        ("aten.view.default", "copy"),
        ("aten.cross_entropy_loss.default", "loss"),
        ("aten.lstm.input", "matmul"),
        ("fxpart.experts.default", "matmul"),
        ("mine.fast_layer_norm.default", "normalisation"),
        ("mine.op.default", "other"),
    ],
)
def test_classes(name: str, kind: str) -> None:
    assert op_class(OpSpec(name, (), ())) == kind
