"""Plans that recompute activations where memory is short: priced, explained and trained."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import nn

import fxpart
from fxpart import Cluster, Device, FxpartError, Link, Plan, Program
from fxpart.cluster.devices import Host

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH, WORDS = 12, 24, 64, 50


class Layer(nn.Module):
    """Attention with explicit scores, and a feed-forward part with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


class Words(nn.Module):
    """A small language model; its embedding and its head are not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.table(x)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=made)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


@cache
def program() -> Program:
    torch.manual_seed(0)
    model = Words()
    return fxpart.compile(model, cluster(2), example_inputs=batch(), loss=loss)


@cache
def stored() -> Program:
    """Return one stage that stores its activations, with as many microbatches."""
    return program().replan(cluster(1), constraints={"microbatches": 4, "recompute": "none"})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def cluster(count: int, memory: int = 10**9, kind: str = "cpu", host: int = 0) -> Cluster:
    devices = tuple(
        Device(
            name=f"d{i}", kind=kind, model="made", host="h", memory=memory,
            flops={"float32": 2e11}, bandwidth=2e10,
        )
        for i in range(count)
    )  # fmt: skip
    link = Link(source="*", target="*", latency=2e-6, bandwidth=1e9)
    hosts = (Host(name="h", memory=host),) if host else UNSET
    return Cluster(name="made", devices=devices, links=(link,), hosts=hosts)


def planned(memory: int = 10**9, count: int = 2, **constraints: int | float | str | bool) -> Plan:
    return program().replan(cluster(count, memory), constraints=constraints).plan


def needs(plan: Plan) -> int:
    """Return the most that a device needs, as a memory that limits provide for."""
    return max(rank.tensors for rank in plan.prediction.ranks)


FIXED = {"dp": 1, "tp": 1, "stages": 2, "microbatches": 4}


def test_only_stages_that_do_not_fit_recompute() -> None:
    free = planned(**FIXED)
    assert [s.recompute for s in free.stages] == ["none", "none"]
    assert "recompute none or selective or full per stage" in free.certificate.over
    tight = planned(int(needs(free) * 0.97 / 0.9), **FIXED)
    modes = [s.recompute for s in tight.stages]
    assert modes.count("none") < 2
    assert tight.certificate.status == "optimal"
    assert tight.prediction.step_seconds > free.prediction.step_seconds
    for rank in tight.prediction.ranks:
        assert rank.tensors <= rank.memory_limit
    with pytest.raises(FxpartError, match="FXP204"):
        planned(int(needs(free) * 0.97 / 0.9), forbid="recompute", **FIXED)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_fixed_mode_is_planned_and_trained_like_one_process(schedule: str, mode: str) -> None:
    """Losses and weights are those of one stage that stores its activations, to the bit."""
    made = program().replan(
        cluster(2),
        constraints={**FIXED, "recompute": mode, "schedule": schedule},
    )
    assert {stage.recompute for stage in made.plan.stages} == {mode}
    assert made.plan.schedule == schedule
    ours, plain = (one.trainer(sgd) for one in (made, stored()))
    for step in range(2):
        assert float(ours.step(batch(step))) == float(plain.step(batch(step)))
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())


def test_a_mesh_with_a_fixed_mode() -> None:
    made = planned(count=4, mesh="dp=2", stages=2, recompute="full")
    assert {stage.recompute for stage in made.stages} == {"full"}
    assert made.mesh["dp"] == 2


def test_reported_modes_can_be_fixed_and_no_mode_left_is_refused() -> None:
    free = planned(**FIXED)
    tight = int(needs(free) * 0.97 / 0.9)
    best = planned(tight, **FIXED)
    every = ",".join(sorted({stage.recompute for stage in best.stages}))
    again = planned(tight, recompute=every, **FIXED)
    assert again.prediction.step_seconds == best.prediction.step_seconds
    with pytest.raises(FxpartError, match="FXP202"):
        planned(forbid="recompute=none;recompute=selective;recompute=full")


def test_more_memory_is_never_slower() -> None:
    need, times = needs(planned(**FIXED)) / 0.9, []
    for share in (0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1):
        try:
            times.append(planned(int(share * need), dp=1, tp=1).prediction.step_seconds)
        except FxpartError as fault:
            assert fault.code == "FXP204" and not times
    assert len(times) > 3
    assert times == sorted(times, reverse=True)


def test_offload_is_named_where_memory_is_short() -> None:
    """The remedy is a constraint; its plan fits, is stored and checked. The default is as fast."""
    free = {**FIXED, "recompute": "none"}
    whole = program().replan(cluster(2, kind="gpu"), constraints=free).plan
    memory = int(
        (needs(whole) - min(r.memory.optimizer for r in whole.prediction.ranks) / 2) / 0.92
    )
    small = cluster(2, memory, "gpu")
    with pytest.raises(FxpartError, match=r"FXP204[\s\S]*offload=optimizer"):
        program().replan(small, constraints={**free, "offload": "none"})
    plan = program().replan(small, constraints={**free, "offload": "optimizer"}).plan
    default = program().replan(small, constraints=free).plan
    assert default.prediction.step_seconds <= plan.prediction.step_seconds
    assert default.offload != "none" and "offload" not in default.constraints
    assert default.provenance["offload"].endswith("nothing fits without")
    assert Plan.loads(plan.dumps()) == plan.validate() and plan.offload == "optimizer"
    assert plan.prediction.step_seconds > whole.prediction.step_seconds
    for rank, before in zip(plan.prediction.ranks, whole.prediction.ranks, strict=True):
        assert rank.memory.optimizer == 0 and rank.host > before.memory.optimizer > 0
    with pytest.raises(FxpartError, match=r"FXP204[\s\S]*on h, which has 1000"):
        few = cluster(2, memory, "gpu", host=1000)
        program().replan(few, constraints={**free, "offload": "optimizer"})


@pytest.mark.slow
def test_both_solvers_recompute_where_memory_is_short() -> None:
    whole = program().replan(cluster(2), constraints=FIXED).plan
    small = cluster(2, int(needs(whole) * 0.75))
    found, other = (
        program().replan(small, constraints={**FIXED, "offload": "none", **more}).plan
        for more in ({}, {"solver": "cp-sat"})
    )
    assert any(stage.recompute != "none" for stage in found.stages)
    assert other.prediction.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("given", [{}, FIXED, {"mesh": "dp=2", "zero": 1}])
def test_offloads_compete_by_their_seconds(given: dict[str, Any]) -> None:
    """The best of all is selected on request; by default it is where nothing fits without."""
    need = needs(program().replan(cluster(2, kind="gpu"), constraints=given).plan)
    selected = set()
    for share in (0.15, 0.4, 0.9, 1.5):
        small = cluster(2, int(need * share), "gpu", host=10**12)
        times: dict[str, float] = {}
        for offload in ("none", "optimizer", "activations", "both"):
            with suppress(FxpartError):
                plan = program().replan(small, constraints={**given, "offload": offload}).plan
                times[offload] = plan.prediction.step_seconds
        for asked in ("auto", ""):
            wanted = {"offload": asked} if asked else {}
            try:
                plan = program().replan(small, constraints={**given, **wanted}).plan
            except FxpartError as fault:
                assert fault.code == "FXP204" and not times
                continue
            least = times.get("none", min(times.values())) if not asked else min(times.values())
            assert plan.prediction.step_seconds == least == times[plan.offload]
            assert plan.constraints == given | wanted and Plan.loads(plan.dumps()) == plan
            selected.add(plan.offload)
    assert len(selected) > 1


def test_an_update_on_the_host_is_no_faster() -> None:
    """Also of small parameters, whose update costs a device only the start of its kernels."""
    given = {**FIXED, "recompute": "none"}
    times = [
        program().replan("1x2xa40", constraints={**given, "offload": offload}).plan.prediction
        for offload in ("none", "optimizer")
    ]
    for before, after in zip(times[0].ranks, times[1].ranks, strict=True):
        assert after.optimizer_seconds > before.optimizer_seconds > 0


def test_activations_in_flight_are_on_the_host() -> None:
    free = {**FIXED, "recompute": "none", "schedule": "gpipe"}
    plain, small = (
        program().replan(cluster(2, kind="gpu"), constraints={**free, "offload": name}).plan
        for name in ("none", "activations")
    )
    rows = zip(plain.prediction.ranks, small.prediction.ranks, strict=True)
    for before, after in rows:
        assert after.memory.activations < before.memory.activations
        assert after.host > 0 == before.host and after.forward_seconds >= before.forward_seconds


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("offload", ["optimizer", "activations", "both"])
def test_a_plan_with_offload_trains_the_same_bits(offload: str, recompute: str) -> None:
    given = {**FIXED, "offload": offload, "recompute": recompute}
    found = program().replan(cluster(2), constraints=given)
    made, plain = found.trainer(torch.optim.AdamW), stored().trainer(torch.optim.AdamW)
    assert made.options.offload == found.plan.offload == offload
    for seed in range(3):
        assert torch.equal(made.step(batch(seed)), plain.step(batch(seed)))
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("given", [{"offload": "auto"}, {}])
def test_a_plan_that_selects_offload_trains_the_same_bits(given: dict[str, str]) -> None:
    """The plan of accelerators with little memory, on two CPUs."""
    free = {**FIXED, "recompute": "none"}
    whole = program().replan(cluster(2, kind="gpu"), constraints=free).plan
    small = cluster(2, int(needs(whole) * 0.75), "gpu", host=10**12)
    plan = program().replan(small, constraints=free | given).plan
    assert plan.offload != "none"
    local = replace(plan, cluster=cluster(2), cluster_hash=cluster(2).hash)
    torch.manual_seed(0)
    found = fxpart.compile(Words(), plan=local, example_inputs=batch(), loss=loss)
    made, plain = found.trainer(torch.optim.AdamW), stored().trainer(torch.optim.AdamW)
    assert made.options.offload == plan.offload
    for seed in range(3):
        assert torch.equal(made.step(batch(seed)), plain.step(batch(seed)))


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "async", "offload": "both"},
        {"mode": "queue", "offload": "auto"},
        {"recompute": "selective", "offload": "both"},
    ],
)
def test_decisions_that_exclude_offload(given: dict[str, str]) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        planned(**given)
