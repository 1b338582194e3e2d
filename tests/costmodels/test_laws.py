"""Laws that hold for every cost model in the table, and that the table is complete."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from math import hypot
from pathlib import Path

import msgspec
import pytest
from fxpart.costmodels import COST_MODELS, ProfileCostModel, find
from hypothesis import given, settings
from hypothesis import strategies as st
from outside_cost_model import FlatRate

from fxpart import costmodels
from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.costs import Cost, CostModel, OpSpec, TensorSpec
from fxpart.errors import FxpartError

ROOT = Path(__file__).parent.parent.parent / "costmodels"
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64", "int64", "bool"])
DIMS = st.integers(1, 512)
PLACEMENTS = st.sampled_from(["replicate", "partial", "shard(0)", "shard(1)"])
SIZES = st.floats(0, 1e13)

devices = st.builds(
    Device,
    name=st.just("d"),
    kind=st.sampled_from(["cpu", "gpu"]),
    model=st.just("m"),
    host=st.just("h"),
    memory=st.just(10**9),
    flops=st.dictionaries(DTYPES, st.floats(1e9, 1e16), min_size=1),
    bandwidth=st.floats(1e8, 1e14),
    launch=st.floats(0, 1e-3),
)
links = st.builds(
    Link,
    source=st.just("a"),
    target=st.just("b"),
    latency=st.floats(0, 1e-2),
    bandwidth=st.floats(1e6, 1e13),
    kind=st.sampled_from(["net", "nvlink", "shm"]),
)
rings = st.lists(links, max_size=6)


@st.composite
def ops(draw: st.DrawFn) -> OpSpec:
    """Ops of each kind that rules tell apart, with consistent shapes."""
    b, m, k, n = (draw(DIMS) for _ in range(4))
    dtype = draw(DTYPES)

    def tensor(*shape: int, of: str = dtype) -> TensorSpec:
        return TensorSpec(shape, of)

    kind = draw(st.sampled_from(["linear", "gelu", "view", "embedding", "conv2d", "sdpa", "other"]))
    table = {
        "linear": ("aten.linear.default", (tensor(b, m, k), tensor(n, k)), tensor(b, m, n)),
        "gelu": ("aten.gelu.default", (tensor(b, m),), tensor(b, m)),
        "view": ("aten.view.default", (tensor(b, m),), tensor(b * m)),
        "embedding": (
            "aten.embedding.default",
            (tensor(n, k), tensor(b, m, of="int64")),
            tensor(b, m, k),
        ),
        "conv2d": (
            "aten.conv2d.default",
            (tensor(b, 3, m + 2, n + 2), tensor(8, 3, 3, 3)),
            tensor(b, 8, m, n),
        ),
        "sdpa": (
            "aten.scaled_dot_product_attention.default",
            (tensor(b, 2, m, 8), tensor(b, 2, n, 8), tensor(b, 2, n, 8)),
            tensor(b, 2, m, 8),
        ),
        "other": ("mine.op.default", (tensor(b, m),), tensor(b)),
    }
    name, inputs, output = table[kind]
    wanted = tuple(i for i in range(len(inputs)) if draw(st.booleans()))
    return OpSpec(name, inputs, (output,), gradients=len(wanted), gradient_inputs=wanted)


def sound(cost: Cost) -> None:
    for value in (cost.seconds, cost.bytes, cost.flops):
        assert math.isfinite(value) and value >= 0
    assert cost.source


@pytest.fixture(params=[*COST_MODELS, FlatRate.name], scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[CostModel]:
    """Every model of the table, those of installed packages too, and one that a test registers."""
    if request.param == FlatRate.name:
        COST_MODELS.register(FlatRate.name, FlatRate)
    yield find(request.param)
    if request.param == FlatRate.name:
        COST_MODELS.unregister(FlatRate.name)


laws = settings(max_examples=60, deadline=None)


@given(op=ops(), device=devices, backward=st.booleans())
@laws
def test_op_costs_are_sound_and_equal_twice(
    model: CostModel, op: OpSpec, device: Device, backward: bool
) -> None:
    cost = model.op(op, device, backward)
    sound(cost)
    assert cost == model.op(op, device, backward)
    if backward and not op.gradients:
        assert cost.seconds == 0


@given(op=ops(), device=devices, backward=st.booleans(), faster=st.floats(1, 100))
@laws
def test_a_better_device_is_never_slower(
    model: CostModel, op: OpSpec, device: Device, backward: bool, faster: float
) -> None:
    before = model.op(op, device, backward).seconds
    for better in (
        msgspec.structs.replace(device, bandwidth=device.bandwidth * faster),
        msgspec.structs.replace(device, flops={d: r * faster for d, r in device.flops.items()}),
        msgspec.structs.replace(device, launch=device.launch / faster),
    ):
        assert model.op(op, better, backward).seconds <= before * (1 + 1e-12)


@given(op=ops(), device=devices, backward=st.booleans(), times=st.integers(2, 4))
@laws
def test_a_larger_batch_is_never_faster(
    model: CostModel, op: OpSpec, device: Device, backward: bool, times: int
) -> None:
    def grown(tensor: TensorSpec) -> TensorSpec:
        return TensorSpec((tensor.shape[0] * times, *tensor.shape[1:]), tensor.dtype)

    weights = op.inputs[1:] if "linear" in op.name or "conv" in op.name else ()
    inputs = (
        (op.inputs[0], *map(grown, op.inputs[1:]))
        if "embedding" in op.name
        else (grown(op.inputs[0]), *(weights or map(grown, op.inputs[1:])))
    )
    larger = replace(op, inputs=inputs, outputs=tuple(map(grown, op.outputs)))
    small, large = (model.op(x, device, backward).seconds for x in (op, larger))
    assert small <= large * (1 + 1e-12)


@given(
    source=PLACEMENTS, target=PLACEMENTS, size=SIZES, more=SIZES, group=st.lists(links, max_size=6)
)
@laws
def test_reshards(
    model: CostModel, source: str, target: str, size: float, more: float, group: list[Link]
) -> None:
    cost = model.reshard(source, target, size, tuple(group))
    sound(cost)
    if source == target:
        assert cost.seconds == cost.bytes == 0
    assert cost.seconds <= model.reshard(source, target, size + more, tuple(group)).seconds
    wider = tuple(msgspec.structs.replace(x, bandwidth=x.bandwidth * 2) for x in group)
    assert model.reshard(source, target, size, wider).seconds <= cost.seconds


@given(device=devices)
@laws
def test_knowledge_is_sound_and_equal_twice(model: CostModel, device: Device) -> None:
    known = model.knowledge(device)
    assert known == model.knowledge(device)
    assert known.slowdown > 0 and known.action >= 0 and known.step >= 0
    assert all(factor >= 0 for factor in known.factors.values())
    assert model.for_model("any") == model and model.provenance()["transfers"]


@given(size=SIZES, more=SIZES, link=links)
@laws
def test_transfers(model: CostModel, size: float, more: float, link: Link) -> None:
    cost = model.transfer(size, link)
    sound(cost)
    assert cost.seconds <= model.transfer(size + more, link).seconds
    wider = msgspec.structs.replace(link, bandwidth=link.bandwidth * 2)
    assert model.transfer(size, wider).seconds <= cost.seconds


def test_every_model_file_has_a_line_in_the_table() -> None:
    found = set()
    for path in ROOT.glob("*.py"):
        if path.stem != "__init__":
            module = importlib.import_module(f"fxpart.costmodels.{path.stem}")
            for kind in vars(module).values():
                own = isinstance(kind, type) and kind.__module__ == module.__name__
                if own and all(hasattr(kind, name) for name in ("op", "reshard", "transfer")):
                    found.add(kind)
    # that one is made of a file: see test_measured.py
    assert found == {*map(COST_MODELS.__getitem__, COST_MODELS.builtin), ProfileCostModel}
    for name, kind in COST_MODELS.items():
        assert kind.from_cluster(None).name == name


def test_find() -> None:
    assert find(costmodels.AUTO) == find("roofline")
    with pytest.raises(FxpartError, match="roofline"):
        find("crystal-ball")


def test_roofline_by_hand() -> None:
    """An H100's kernels: start + (arithmetic² + traffic²)^½ at achieved rates; a view is free."""
    (device, *_) = Cluster.parse("1xh100").devices
    model = find("roofline")
    x, w = TensorSpec((8192, 4096), "bfloat16"), TensorSpec((4096, 4096), "bfloat16")
    linear = OpSpec("aten.linear.default", (x, w), (x,), gradients=2)
    forward, backward = (model.op(linear, device, b) for b in (False, True))
    each = hypot(4 * 4096**3 / (0.68 * 989.4e12), 10 * 4096**2 / (0.9 * 3.35e12)) + 2e-6
    assert forward.seconds == pytest.approx(each)
    assert backward.seconds == pytest.approx(2 * each, rel=0.01)
    gelu = OpSpec("aten.gelu.default", (x,), (x,), gradients=1)
    assert model.op(gelu, device, False).seconds == pytest.approx(
        8 * 4096**2 / (0.9 * 3.35e12) + 2e-6
    )
    assert model.op(gelu, device, True).bytes == 12 * 4096**2
    view = OpSpec("aten.view.default", (x,), (x,), gradients=1)
    assert model.op(view, device, False).seconds == model.op(view, device, True).seconds == 0


def test_a_missing_rate_is_said() -> None:
    (device, *_) = Cluster.parse("1xt4").devices
    x = TensorSpec((64, 64), "bfloat16")
    cost = find("roofline").op(OpSpec("aten.mm.default", (x, x), (x,)), device, False)
    assert "float32 rate for bfloat16" in cost.source
    unknown = OpSpec("mine.op.default", (x,), (x,))
    assert "mine.op" in find("roofline").op(unknown, device, False).source
