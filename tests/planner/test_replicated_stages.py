"""Plans for clusters of unlike devices: copies where they pay, and never worse than one kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from fxpart.costmodels.profile_store import (
    Calibration,
    ContentionProfile,
    Profile,
    StageMeasurement,
    TimeQuartiles,
)
from fxpart.costmodels.roofline import Roofline
from torch import nn

import fxpart
from fxpart import units
from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.costs import Cost, DeviceKnowledge
from fxpart.plan.model import Plan
from fxpart.planner.refinement import FIRST, keys_of
from fxpart.planner.whatif import choice_of
from fxpart.profiling.session import get_measurement_environment
from fxpart.report.explanation_text import explain


class Recommender(nn.Module):
    """A table that is large, and a tower that is work: what the two kinds are made for."""

    def __init__(self, rows: int = 40_000) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, 32, mode="sum")
        self.tower = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.table(ids)).squeeze(1)


def cluster(*kinds: tuple[str, int, float, float, float], host: int = 1) -> Cluster:
    """Kinds as (name, devices, GFLOP/s, GB/s, MB of memory). host: devices of a host."""
    one = Cluster.local(1).devices[0]
    devices = [
        msgspec.structs.replace(
            one, name=f"{name}-{k}", model=name, host=f"host-{name}-{k // host}",
            memory=int(memory * 1e6),
            flops={"float32": flops * 1e9}, bandwidth=speed * 1e9, launch=1e-6,
        )
        for name, count, flops, speed, memory in kinds
        for k in range(count)
    ]  # fmt: skip
    link = fxpart.cluster.devices.Link(
        source="*", target="*", latency=1e-5, bandwidth=1e10, kind="net"
    )
    return Cluster(name="mixed", devices=tuple(devices), links=(link,)).validate()


def batch(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(40_000, (rows, 4), generator=draw), torch.rand(rows, generator=draw)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Recommender()


def program(given: Cluster, **constraints: object) -> fxpart.Program:
    return fxpart.compile(
        model(), given, example_inputs=batch(), optimizer="adam",
        loss=nn.functional.binary_cross_entropy_with_logits, constraints=constraints,
    )  # fmt: skip


@cache
def fed() -> fxpart.Program:
    """The table needs 20 MB with Adam and its gradient: it does not fit the fast device."""
    return program(cluster(("cpu", 3, 0.02, 4.0, 60.0), ("gpu", 1, 0.2, 40.0, 12.0)))


@pytest.mark.slow
def test_slow_ones_with_memory_feed_a_fast_one() -> None:
    plan = fed().plan
    assert plan.problems() == ()
    assert plan.replicas == ((0, 1, 2),)
    assert [stage.device for stage in plan.stages] == ["cpu", "cpu", "cpu", "gpu"]
    assert plan.stages[0].first == 0 and plan.stages[3].first > 0  # the table is not on the GPU
    assert plan.provenance["kinds"].startswith("3 + 1 replicas: ")
    assert " / 3 cpu = " in plan.provenance["copies"]
    assert plan.certificate.status == "optimal"
    alone = plan.provenance["kinds"]
    assert "equal stages: " in alone and "3 cpu only: " in alone


@pytest.mark.slow
def test_copies_have_room_for_gradients_that_are_summed() -> None:
    """All gradients of a stage's copies once more, as they are less than two buckets."""
    layers = [nn.Linear(64, 64) for _ in range(8)]
    made = fxpart.compile(
        nn.Sequential(*layers), cluster(("only", 3, 0.02, 5.0, 400.0)), optimizer="sgd",
        example_inputs=(torch.randn(64, 64), torch.randn(64, 64)), loss=nn.functional.mse_loss,
        constraints={"copies": "always", "stages": 2},
    )  # fmt: skip
    copied, alone = (
        next(r for r in made.plan.prediction.ranks if bool(r.microbatches) is wanted)
        for wanted in (True, False)
    )
    for row, more in ((copied, copied.memory.gradients), (alone, 0)):  # SGD makes no tensors
        m = row.memory
        assert row.update == m.weights + m.buffers + m.gradients + m.optimizer + more
    assert copied.memory.gradients > 0


def test_links_of_absent_devices_are_refused() -> None:
    whole = cluster(("cpu", 2, 0.02, 4.0, 60.0))
    link = msgspec.structs.replace(whole.links[0], source="cpu-0", target="cpu-7")
    wrong = msgspec.structs.replace(whole, links=(*whole.links, link))
    with pytest.raises(fxpart.FxpartError, match="cpu-7") as caught:
        program(wrong)
    assert caught.value.code == "FXP402"


@pytest.mark.slow
def test_what_if_says_why_it_cannot_tell() -> None:
    made = fed()
    with pytest.raises(fxpart.FxpartError, match="replicated stages"):
        choice_of(made.costed(), made.plan)


@pytest.mark.slow
def test_explain_shows_who_takes_what() -> None:
    """Copies of one stage on one row, with the seconds of a microbatch over their number."""
    text = explain(fed().plan)
    assert "round-robin routing" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("0, 1, 2 "))
    assert "11, 11, 10" in row and row.endswith("3.36 ms")


@pytest.mark.slow
def test_it_trains_as_one_process() -> None:
    made = fed()
    trainer = made.trainer(lambda p: torch.optim.Adam(p, lr=1e-2))
    losses = [trainer.step(batch()).item() for _ in range(3)]
    trainer.close()
    alone = model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=1e-2)
    wanted = []
    for _ in range(3):
        ids, clicks = batch()
        loss = nn.functional.binary_cross_entropy_with_logits(alone(ids), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)


MIXES = [
    (("fast", 2, 8.0, 20.0, 400.0), ("slow", 1, 4.0, 10.0, 400.0)),
    (("fast", 1, 8.0, 20.0, 400.0), ("slow", 3, 2.0, 5.0, 400.0)),
    (("whole", 2, 8.0, 20.0, 400.0), ("half", 2, 8.0, 20.0, 30.0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", MIXES)
def test_never_slower_than_one_kind(
    kinds: tuple[tuple[str, int, float, float, float], ...],
) -> None:
    plan = program(cluster(*kinds)).plan
    assert Plan.loads(plan.dumps()) == plan
    for kind in kinds:
        alone = program(cluster(kind)).plan
        assert plan.prediction.simulated_seconds <= alone.prediction.simulated_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_kinds_that_quotas_make() -> None:
    """Of one model and told apart by what their quotas leave."""
    given = cluster(("cpu", 2, 8.0, 20.0, 400.0))
    slow = msgspec.structs.replace(given.devices[1], quota=0.5, flops={"float32": 4e9})
    given = msgspec.structs.replace(given, devices=(given.devices[0], slow))
    plan = program(given).plan
    assert "1 cpu of 0.5 cores only: " in plan.provenance["kinds"]
    assert "1 cpu only: " in plan.provenance["kinds"]


@pytest.mark.slow
def test_copies_are_left_alone_where_that_is_asked() -> None:
    given = cluster(*MIXES[0])
    assert "kinds" not in program(given, copies="none").plan.provenance
    assert program(given, copies="none").plan.replicas == ()


@pytest.mark.slow
@pytest.mark.parametrize("wish", [{"dp": 1}, {"tp": 1}, {"forbid": "dp"}, {"stage": "table=0"}])
def test_wishes_about_degrees_and_cuts_leave_them_out(wish: dict[str, object]) -> None:
    assert "kinds" not in program(cluster(*MIXES[0]), **wish).plan.provenance


@pytest.mark.slow
def test_copies_on_equal_devices_where_that_is_asked() -> None:
    """Three equal devices, two stages: the longer one gets two."""
    given = cluster(("only", 3, 0.02, 5.0, 400.0))
    plain = program(given, stages=2).plan
    assert "kinds" not in plain.provenance and not plain.replicas
    plan = program(given, copies="always", stages=2).plan
    assert plan.replicas == ((1, 2),)
    assert plan.prediction.simulated_seconds < 0.6 * plain.prediction.simulated_seconds


def wide(given: Cluster, **constraints: object) -> fxpart.Program:
    """Layers that are work, for SGD."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    return fxpart.compile(
        nn.Sequential(*layers), given, example_inputs=(torch.randn(24, 64), torch.randn(24, 64)),
        loss=nn.functional.mse_loss, optimizer="sgd", constraints=constraints,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more"), [("tp=2", {}), ("dp=2", {"zero": 1}), ("dp=2", {"stages": 2, "zero": 2})]
)
def test_replicas_of_a_mesh(mesh: str, more: dict[str, object]) -> None:
    """Pairs of devices of one host and kind; one more slow device is left out."""
    given = cluster(("slow", 5, 0.05, 4.0, 400.0), ("fast", 2, 0.2, 16.0, 400.0), host=2)
    made = wide(given, mesh=mesh, **more)
    plan = made.plan
    assert plan.problems() == plan.runnable == () and Plan.loads(plan.dumps()) == plan
    assert plan.replicas and plan.world == 6
    for stage in plan.stages:
        assert len({plan.device(rank).host for rank in stage.ranks}) == 1 == 3 - len(stage.ranks)
    assert f" replicas of {mesh}: " in plan.provenance["kinds"]
    space = f"replicas of {mesh} on any of 2 groups of 2 slow, 1 groups of 2 fast"
    assert space in plan.certificate.over
    assert 0 < plan.certificate.lower_bound <= plan.certificate.objective
    rows = plan.prediction.ranks
    assert all(row.sync_seconds > 0 for row in rows if mesh == "dp=2")
    assert not wide(given, mesh=mesh, copies="none", **more).plan.replicas
    assert made.verify(steps=2).passed


@pytest.mark.slow
def test_replicas_of_the_meshes_of_the_best_plans() -> None:
    """Where the mesh is open, and with one rank a replica has to wait longer."""
    given = cluster(("slow", 4, 0.05, 4.0, 400.0), ("fast", 2, 0.2, 16.0, 400.0), host=2)
    torch.manual_seed(0)
    made = fxpart.compile(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)), given,
        example_inputs=(torch.randn(64, 256), torch.randn(64, 256)), optimizer="sgd",
        loss=nn.functional.mse_loss, microbatches=16, constraints={"granularity": "op"},
    )  # fmt: skip
    plan = made.plan
    assert plan.mesh["tp"] == 2 and plan.replicas
    assert "replicas of tp=2: " in plan.provenance["kinds"]
    assert " replicas: " in plan.provenance["kinds"]


@pytest.mark.slow
def test_replicas_of_a_mesh_use_the_ranks_that_are_requested() -> None:
    given = Cluster.local(6)
    plan = wide(given, mesh="tp=2", copies="always", stages=2, ranks=6).plan
    assert plan.world == 6 and plan.mesh == {"pipeline": 2, "tp": 2} and len(plan.replicas) == 1
    for ranks in (5, 2):
        with pytest.raises(fxpart.FxpartError, match="FXP502"):
            wide(given, mesh="tp=2", copies="always", stages=2, ranks=ranks)


class EveryStage(Mapping[str, StageMeasurement]):
    """A timing for any key."""

    def __init__(self, device: Device) -> None:
        self.times = 2.0 if device.model == "cpu" else 1.0

    def __getitem__(self, key: str) -> StageMeasurement:
        back = 3.0 if key.endswith(FIRST) else 5.0
        forward, backward, update = (
            TimeQuartiles(s, s, s, 5) for s in (2.0 * self.times, back * self.times, 7 * self.times)
        )
        return StageMeasurement(forward=forward, backward=backward, optimizer=update, rows=1)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Whole(Roofline):
    """Knows every stage as a whole: a forward takes 2 s, backwards 3 s and then 5 s, an update 7 s.

    On a slow device twice as long. No ranks share a stage: their collectives take minutes.
    """

    def reshard(self, source: str, target: str, size: float, links: tuple[Link, ...]) -> Cost:
        return Cost(600.0 if links and source != target else 0.0, source="test")

    def knowledge(self, device: Device) -> DeviceKnowledge:
        return DeviceKnowledge(contention=ContentionProfile(), stages=EveryStage(device))


@pytest.mark.slow
def test_copies_take_what_stages_took_as_a_whole() -> None:
    """Each by its own device, its first microbatch apart; what is proven stays of costs of ops."""
    given = cluster(("cpu", 2, 0.1, 20.0, 60.0), ("gpu", 1, 0.2, 40.0, 60.0))
    made = fxpart.compile(
        model(), given, example_inputs=batch(), optimizer="adam", microbatches=8,
        loss=nn.functional.binary_cross_entropy_with_logits, cost_model=Whole(),
        constraints={"copies": "always"},
    )  # fmt: skip
    plan = made.plan
    assert plan.replicas and plan.certificate.objective < 1.0 < plan.prediction.step_seconds
    assert plan.provenance["choice"] == "every stage measured whole"
    for row in plan.prediction.ranks:
        times = 2.0 if plan.device(row.ranks[0]).model == "cpu" else 1.0
        taken = row.microbatches or plan.microbatches
        assert row.forward_seconds == pytest.approx(times * 2.0)
        assert row.backward_seconds == pytest.approx(times * (3.0 + (taken - 1) * 5.0) / taken)
        assert row.optimizer_seconds == pytest.approx(times * 7.0)


@pytest.mark.slow
def test_one_kind_alone_has_its_host_for_itself(tmp_path: Path) -> None:
    """What ranks of the other kind would slow down does not count, as in a cluster without them."""
    fast, slow = (
        msgspec.structs.replace(d, threads=1, quota=quota)
        for d, quota in zip(Cluster.local(2).devices, (0.9, 0.8), strict=True)
    )
    both = msgspec.structs.replace(Cluster.local(2), devices=(fast, slow))
    one, path, place = (
        both.part([0]),
        tmp_path / "a.profile",
        get_measurement_environment(fast.model),
    )
    made = fxpart.compile(
        model(), one, example_inputs=batch(), loss=nn.functional.binary_cross_entropy_with_logits
    )
    info = made.plan.model.fingerprint
    stages = {}
    for rows in range(1, 65):
        taken = TimeQuartiles(rows / 64, rows / 64, rows / 64, 5)
        known = StageMeasurement(forward=taken, backward=taken, optimizer=taken, rows=rows)
        for key in keys_of(made.captured, made.spec, made.sources, rows, "adamw"):
            stages |= {key: known, key + FIRST: known}
    with Profile(path, create=True) as profile:
        profile.put("calibrations", place, {info: Calibration(factors={"matmul forward": 1.0})})
        profile.put("crowding", place, {info: ContentionProfile(slowdown=(1.0, 3.0))})
        profile.put("stages", place, stages)
    alone = made.replan(one, cost_model=path).plan.prediction.simulated_seconds
    assert alone > 2.0  # forward and backward of 64 rows
    words = made.replan(both, cost_model=path).plan.provenance["kinds"]
    assert f"0.9 cores only: {units.seconds(alone)}" in words, words
