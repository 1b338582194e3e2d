"""Costs from a profile: keys, classes, what was measured, what lies between, what is missing."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
from fxpart.costmodels import ProfileCostModel, find
from fxpart.costmodels.op_classes import CLASSES, op_class
from fxpart.costmodels.op_keys import family, op_key, parse_key
from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    Profile,
    StageMeasurement,
    TimeQuartiles,
    TrialRun,
)
from fxpart.costmodels.roofline import Roofline
from hypothesis import given, settings
from hypothesis import strategies as st
from written_profiles import HERE, ahead, cluster, linear, measured
from zoo import ZOO
from zoo_graphs import captured, prepared

from fxpart.cluster.devices import Device, Host
from fxpart.cluster.model import Cluster
from fxpart.costs import OpSpec, TensorSpec
from fxpart.pricing.device_groups import group_devices
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import BatchSplit, Sizes

changed = msgspec.structs.replace
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


@pytest.mark.slow
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


def test_seconds_are_alone_times_factor_times_crowd() -> None:
    calibrations = {"": Calibration(factors={"matmul forward": 1.2, "matmul backward": 0.5})}
    both = {ahead(linear(8)): 1e-3, f"{op_key(linear(8))} backward": 3e-3}
    model = measured(both, calibrations=calibrations)
    device = cluster().devices[0]
    assert model.op(linear(8), device, False).seconds == pytest.approx(1e-3 * 1.2 * 1.5)
    assert model.op(linear(8), device, True).seconds == pytest.approx(3e-3 * 0.5 * 1.5)
    four = measured(both, cluster(4), calibrations)
    assert four.knowledge(cluster(4).devices[0]).slowdown == pytest.approx(
        3.0
    )  # past the curve, in proportion
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
    for device, slowed in zip(on.devices, (1.375, 1.5, 1.5), strict=True):
        assert model.knowledge(device).slowdown == pytest.approx(slowed / device.share)
        seconds = model.op(linear(8), device, False).seconds
        assert seconds == pytest.approx(1e-3 * slowed / device.share)
    (group,) = group_devices(held(0.75, 0.25), 2).devices
    assert group.name == on.devices[0].name and group.share == 0.25
    assert model.op(linear(8), group, False).seconds == pytest.approx(1e-3 * slowed / 0.25)
    assert measured(known, held(4.0, 1.0)).knowledge(cluster().devices[0]).slowdown == 1.5


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


def test_a_models_own_calibration_and_contention_come_first() -> None:
    calibrations = {
        name: Calibration(factors={"matmul forward": factor})
        for name, factor in (("a", 2.0), ("b", 3.0))
    }
    contention = {
        "a": ContentionProfile(slowdown=(1.0, 2.0)),
        "": ContentionProfile(slowdown=(1.0, 1.0)),
    }
    model = measured({ahead(linear(8)): 1.0}, None, calibrations, contention)
    device = cluster().devices[0]
    assert model.for_model("a").op(linear(8), device, False).seconds == pytest.approx(4.0)
    assert model.for_model("b").op(linear(8), device, False).seconds == pytest.approx(3.0)
    # of two models' factors none is that of a third
    assert model.for_model("c").knowledge(device).factors == {}
    contention = model.for_model("c").knowledge(device).contention
    assert contention == ContentionProfile(slowdown=(1.0, 1.0))


def test_a_hosts_own_curve_where_the_profile_has_none() -> None:
    hosts = (Host(name="local", cores=2, slowdown=(1.0, 1.8)),)
    model = measured(
        {ahead(linear(8)): 1.0}, cluster(hosts=hosts), None, {"x": ContentionProfile()}
    )
    assert model.for_model("y").knowledge(cluster().devices[0]).slowdown in (1.0, 1.8)
    with tempfile.TemporaryDirectory() as folder:
        with Profile(Path(folder) / "a.db", create=True) as profile:
            profile.put("ops", HERE, {"x": TimeQuartiles(1.0, 1.0, 1.0, 1)})
        found = find(Path(folder) / "a.db", cluster(hosts=hosts))
    assert found.knowledge(cluster().devices[0]).slowdown == 1.8


def test_stages_and_links() -> None:
    timing = TimeQuartiles(1.0, 1.0, 1.0, 3)
    stage = StageMeasurement(forward=timing, backward=timing, optimizer=timing, rows=2)
    with tempfile.TemporaryDirectory() as folder:
        with Profile(Path(folder) / "a.db", create=True) as profile:
            profile.put("stages", HERE, {"s": stage})
        found = find(Path(folder) / "a.db", cluster())
    assert found.knowledge(cluster().devices[0]).stages == {"s": stage}
    links = cluster().links
    assert found.transfer(1e6, links[0]) == Roofline().transfer(1e6, links[0])
    assert found.reshard("partial", "replicate", 1e6, links * 2) == Roofline().reshard(
        "partial", "replicate", 1e6, links * 2
    )


def test_ranks_that_meet_in_a_collective() -> None:
    """What was measured of meeting is added to every collective of a host, and to nothing else."""
    meets = {"": ContentionProfile(slowdown=(1.0, 1.5), meet=(1e-3, 2e-3))}
    model, links = measured({}, cluster(4), None, meets), cluster(4).links
    total = ("partial", "replicate", 1e6)
    for ranks, later in ((2, 1e-3), (3, 2e-3), (4, 2e-3)):
        ring = links[:1] * ranks
        free = Roofline().reshard(*total, ring).seconds
        assert model.reshard(*total, ring).seconds == pytest.approx(free + later)
    assert model.reshard("replicate", "shard(0)", 1e6, links[:1] * 2).seconds == 0.0
    assert model.transfer(1e6, links[0]) == Roofline().transfer(1e6, links[0])
    for quotas, later in (((0.5,) * 4, 1e-3), ((0.9, 0.5, 0.5, 0.5), 2e-3), ((0.2,) * 4, 1e-3)):
        under = measured({}, held(*quotas), None, meets)  # of two cores, of three, of one
        assert under.reshard(*total, links[:1] * 4).seconds == pytest.approx(
            Roofline().reshard(*total, links[:1] * 4).seconds + later
        )
    far = tuple(msgspec.structs.replace(link, kind="net") for link in links[:1] * 2)
    assert model.reshard(*total, far) == Roofline().reshard(*total, far)


def test_what_ran_on_one_host_says_nothing_of_several() -> None:
    timing = TimeQuartiles(1.0, 1.0, 1.0, 3)
    known = TrialRun(seconds=timing, label="", model="", predicted=2.0)
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
    runs = [each.knowledge(one.devices[0]).trial_runs for each in (here, there, slow)]
    assert runs == [{"k": known}, {}, {}]


@cache
def twice() -> tuple[ProfileCostModel, ProfileCostModel]:
    """One profile, read twice."""
    known = {ahead(linear(8)): 1e-3, "not a key forward": 1.0, '["x"] forward': 1.0}
    return measured(known), measured(known)


@pytest.mark.slow
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
    rows = Sizes(made, BatchSplit(made.batch_size, 1))
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
        ("aten.dropout.default", "random"),
        ("aten.rand_like.default", "random"),
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
