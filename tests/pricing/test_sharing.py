"""Groups of devices, rings of links, and what ZeRO and sums of gradients cost."""

from __future__ import annotations

from itertools import product

import pytest
from fxpart.costmodels import find

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError
from fxpart.planner.request import make_request
from fxpart.pricing.device_groups import Rings, group_devices
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.program.spec import select_zero_axes
from fxpart.sharding import Mesh
from fxpart.solver.problem import Weight


def cluster(hosts: int = 2, each: int = 4) -> Cluster:
    """Devices that grow slower by their number; links within and between hosts, one of its own."""
    devices = tuple(
        Device(
            name=f"h{h}/gpu:{d}", kind="gpu", model="g", host=f"h{h}", memory=(10 + h * each + d),
            flops={"float32": 100.0 - d}, bandwidth=1000.0 - h, launch=1e-6 * d, source="test",
        )
        for h in range(hosts)
        for d in range(each)
    )  # fmt: skip
    links = [
        Link(source="*", target="*", latency=1e-4, bandwidth=1e8, kind="net"),
        *(
            Link(source=f"h{h}", target=f"h{h}", latency=1e-6, bandwidth=1e10, kind="nvlink")
            for h in range(hosts)
        ),
        Link(source="h0/gpu:1", target="h1/gpu:2", latency=2e-4, bandwidth=1e7, kind="net"),
    ]
    return Cluster(name="test", devices=devices, links=tuple(links))


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_a_group_is_its_slowest_member_and_links_are_the_worst(lanes: int) -> None:
    whole = cluster()
    small = group_devices(whole, lanes)
    assert len(small.devices) == 8 // lanes
    groups = [whole.devices[g * lanes : (g + 1) * lanes] for g in range(8 // lanes)]
    for device, members in zip(small.devices, groups, strict=True):
        assert device.memory == min(m.memory for m in members)
        assert device.flops["float32"] == min(m.flops["float32"] for m in members)
        assert device.launch == max(m.launch for m in members)
    for (a, one), (b, other) in product(enumerate(groups), repeat=2):
        if a != b:
            found = small.link(small.devices[a], small.devices[b])
            pairs = [whole.link(x, y) for x, y in product(one, other)]
            assert found.latency == max(p.latency for p in pairs)
            assert found.bandwidth == min(p.bandwidth for p in pairs)


def test_rings_are_the_slowest_of_all_groups() -> None:
    rings = Rings(cluster(), Mesh.parse("dp=2,tp=2"))
    assert [link.bandwidth for link in rings("tp")] == [1e10] * 2
    assert [link.bandwidth for link in rings("dp")] == [1e10] * 2
    assert len(rings("dp", "tp")) == 4
    across = Rings(cluster(), Mesh.parse("dp=2,tp=4"))
    assert min(link.bandwidth for link in across("dp")) == 1e8
    assert Rings(cluster(), Mesh.parse("dp=1,tp=4"))("dp") == ()


WEIGHTS = (
    Weight(name="a", blocks=(0, 2), weight=1000, gradient=1000, optimizer=2000),
    Weight(name="b", blocks=(1,), weight=500, gradient=500, optimizer=1001),
    Weight(name="frozen", blocks=(1,), weight=300, gradient=0, optimizer=0),
)


def test_sums_are_priced_once_a_step_and_by_what_zero_moves() -> None:
    model, mesh = find("auto"), Mesh.parse("dp=2,tp=2")
    rings = Rings(cluster(), mesh)
    partial = {"a": ("dp", "tp"), "b": ("dp",)}

    def seconds(source: str, target: str, size: float, axis: str) -> float:
        return model.reshard(source, target, size, rings(axis)).seconds

    def share(source: str, target: str, size: float, axis: str) -> float:
        """Its share of a full bucket."""
        return size / (25 << 20) * seconds(source, target, 25 << 20, axis)

    plain = StageParallelism(mesh, partial=partial).compute_reduction_times(
        WEIGHTS, 3, model, rings
    )
    total = ("partial", "replicate")
    a = share(*total, 1000, "dp") + share(*total, 1000, "tp")
    assert plain.by_block == pytest.approx((a, share(*total, 500, "dp"), 0.0))
    assert plain.once == pytest.approx(seconds(*total, 1, "dp") + seconds(*total, 1, "tp"))
    zero = StageParallelism(mesh, partial=partial, zero=1, zero_axis="dp").compute_reduction_times(
        WEIGHTS, 3, model, rings
    )
    b = share("partial", "shard(0)", 500, "dp") + share("shard(0)", "replicate", 500, "dp")
    assert zero.by_block[1] == pytest.approx(b)
    nothing = StageParallelism(Mesh.parse("dp=2")).compute_reduction_times(WEIGHTS, 3, model, rings)
    assert nothing.by_block == (0.0, 0.0, 0.0) and not nothing.once


@pytest.mark.parametrize("zero", [1, 2])
def test_hybrid_sharding_reduces_shards_between_groups(zero: int) -> None:
    """A reduce-scatter and an all-gather in the group, and an all-reduce of half between groups."""
    model, mesh = find("auto"), Mesh.parse("dp=2,dp_shard=2")
    rings = Rings(cluster(), mesh)
    sharing = StageParallelism(
        mesh, partial={"b": ("dp", "dp_shard")}, zero=zero, zero_axis="dp_shard"
    )
    found = sharing.compute_reduction_times(WEIGHTS, 3, model, rings)
    wanted = [
        size / (25 << 20) * model.reshard(*change, 25 << 20, rings(axis)).seconds
        for change, size, axis in (
            (("partial", "shard(0)"), 500, "dp_shard"),
            (("shard(0)", "replicate"), 500, "dp_shard"),
            (("partial", "replicate"), 250, "dp"),
        )
    ]
    assert found.by_block[1] == pytest.approx(sum(wanted))
    assert sharing.divided(WEIGHTS[1]).optimizer == 501


def test_zero_over_several_axes_reduces_once() -> None:
    """Over those axes that the gradient is summed over, and that do not shard the parameter."""
    model, mesh = find("auto"), Mesh.parse("dp=2,cp=2,tp=2")
    rings = Rings(cluster(), mesh)
    partial = {"a": ("dp", "cp", "tp"), "b": ("dp", "cp")}
    sharing = StageParallelism(
        mesh, partial=partial, zero=2, zero_axis="dp,cp", sharded={"b": ("cp",)}
    )
    found = sharing.compute_reduction_times(WEIGHTS, 3, model, rings)

    def share(source: str, target: str, size: float, *axes: str) -> float:
        return size / (25 << 20) * model.reshard(source, target, 25 << 20, rings(*axes)).seconds

    for block, size, both, others in ((0, 1000, ("dp", "cp"), ("tp",)), (1, 500, ("dp",), ("cp",))):
        parts = mesh.count(*both)
        wanted = share("partial", "shard(0)", size, *both)
        wanted += share("shard(0)", "replicate", size, *both)
        wanted += sum(share("partial", "replicate", size / parts, axis) for axis in others)
        assert found.by_block[block] == pytest.approx(wanted)
    held = [sharing.divided(weight) for weight in WEIGHTS]
    assert [(one.gradient, one.optimizer) for one in held] == [(250, 500), (250, 501), (0, 0)]


@pytest.mark.parametrize(
    ("sharded", "partial", "axes"),
    [
        ((), ("dp", "cp"), ("dp", "cp")),
        ((), ("cp",), ("cp",)),
        ((), (), ("dp", "cp")),
        (("cp",), ("dp",), ("dp",)),
        (("cp",), (), ("dp",)),
        (("dp", "cp"), (), ()),
    ],
)
def test_axes_of_one_parameter(
    sharded: tuple[str, ...], partial: tuple[str, ...], axes: tuple[str, ...]
) -> None:
    """Either the gradient is summed over all of them, or it is equal on all of them."""
    assert select_zero_axes("dp,cp", sharded, partial) == axes


def test_rows_of_tables_are_gathered_whatever_zero_does() -> None:
    """Each axis gives every lane the rows of all, once, and nothing is summed."""
    model, mesh = find("auto"), Mesh.parse("dp=2,tp=2")
    rings = Rings(cluster(), mesh)
    table = Weight(
        name="t", blocks=(1,), weight=9000, gradient=800, optimizer=9000, sparse=True
    )  # fmt: skip
    partial = {"t": ("dp", "tp")}

    def share(size: float, axis: str) -> float:
        bucket = model.reshard("shard(0)", "replicate", 25 << 20, rings(axis)).seconds
        return size / (25 << 20) * bucket

    rows = share(400, "dp") + share(400, "tp")
    plain = StageParallelism(mesh, partial=partial).compute_reduction_times(
        (table,), 3, model, rings
    )
    assert plain.by_block == pytest.approx((0.0, rows, 0.0))
    zero = StageParallelism(mesh, partial=partial, zero=2, zero_axis="dp").compute_reduction_times(
        (table,), 3, model, rings
    )
    assert zero.by_block == pytest.approx((0.0, rows + share(9000, "dp"), 0.0))


def test_packing_buckets_is_paid_by_the_byte() -> None:
    """An all-reduce reads and writes each byte once more, and so does each half of one."""
    model, mesh = find("auto"), Mesh.parse("dp=2")
    rings = Rings(cluster(), mesh)
    partial = {"a": ("dp",), "b": ("dp",)}

    def more(**options: object) -> tuple[float, ...]:
        sharing = StageParallelism(mesh, partial=partial, **options)  # type: ignore[arg-type]
        free = sharing.compute_reduction_times(WEIGHTS, 3, model, rings).by_block
        paid = sharing.compute_reduction_times(WEIGHTS, 3, model, rings, 1e-3).by_block
        return tuple(b - a for a, b in zip(free, paid, strict=True))

    assert more() == pytest.approx((2.0, 1.0, 0.0))
    assert more(zero=1, zero_axis="dp") == pytest.approx((2.0 + 2.0, 1.0 + 1.0, 0.0))


@pytest.mark.parametrize(
    ("zero", "gradient", "optimizer"), [(0, 500, 1001), (1, 500, 501), (2, 250, 501)]
)
def test_zero_divides_what_it_says(zero: int, gradient: int, optimizer: int) -> None:
    sharing = StageParallelism(Mesh.parse("dp=2"), zero=zero, zero_axis="dp" if zero else "")
    held = sharing.divided(WEIGHTS[1])
    assert (held.weight, held.gradient, held.optimizer) == (500, gradient, optimizer)
    assert sharing.divided(WEIGHTS[2]) == WEIGHTS[2]


def test_every_fault_of_a_request_is_told_at_once() -> None:
    wrong = {"mesh": "dp=2,tp=2", "zero": 4, "zero_axis": "pp", "stages": 0, "placements": "best"}
    with pytest.raises(FxpartError) as caught:
        make_request(cluster(), None, "auto", wrong, 0)
    told = "\n".join(p.where for p in caught.value.problems)
    assert all(key in told for key in ("zero=", "zero_axis", "stages", "placements"))
    with pytest.raises(FxpartError, match="needs? 12 devices|they need 12"):
        make_request(cluster(), None, "auto", {"mesh": "dp=2,tp=2", "stages": 3}, 0)
    with pytest.raises(FxpartError, match="16 ranks"):
        make_request(cluster(), None, "auto", {"mesh": "tp=16"}, 0)
    fine = make_request(cluster(), None, "auto", {"mesh": "dp=2,tp=2", "zero": 1}, 0)
    assert (fine.stages, fine.zero_axis, fine.sharded) == ((1, 2), "dp", True)


@pytest.mark.parametrize("zero", [1, 2])
def test_a_table_that_zero_cuts_is_updated_by_the_rows_of_all(zero: int) -> None:
    """Its gradient is not divided, and settling whose rows are whose is paid by the byte."""
    model, mesh = find("auto"), Mesh.parse("dp=2")
    rings = Rings(cluster(), mesh)
    table = Weight(
        name="t", blocks=(1,), weight=9000, gradient=800, optimizer=9000, sparse=True
    )  # fmt: skip
    sharing = StageParallelism(mesh, partial={"t": ("dp",)}, zero=zero, zero_axis="dp")
    held = sharing.divided(table)
    assert (held.gradient, held.optimizer) == (800, 4500)
    plain = StageParallelism(mesh, partial={"t": ("dp",)})

    def more(one: StageParallelism) -> float:
        paid, free = (
            one.compute_reduction_times((table,), 3, model, rings, rate) for rate in (1e-3, 0.0)
        )
        return paid.by_block[1] - free.by_block[1]

    packed = 2 * 9000  # the table's parts come back
    assert more(sharing) - more(plain) == pytest.approx(1e-3 * (38 * 400 + packed))
