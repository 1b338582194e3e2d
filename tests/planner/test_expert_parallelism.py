"""Expert parallelism that the planner selects: experts over all data-parallel ranks, or none."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from zoo import ZOO
from zoo_language import _LLAMA, _causal

import fxpart
from fxpart import Cluster, Device, FxpartError, Link, Plan, Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ZOO["mixtral"].available, reason="needs transformers"),
]
ONE_STAGE = {"stages": 1, "tp": 1}


def cluster(count: int, bandwidth: float) -> Cluster:
    """Equal devices; gradients of replicated experts take long over slow links."""
    devices = tuple(
        Device(
            name=f"d{i}", kind="cpu", model="made", host="h", memory=1 << 34,
            flops={"float32": 1e13}, bandwidth=1e12,
        )
        for i in range(count)
    )  # fmt: skip
    link = Link(source="*", target="*", latency=1e-6, bandwidth=bandwidth)
    return Cluster(name="mixture", devices=devices, links=(link,))


@cache
def program() -> Program:
    """A mixture of two layers with four experts, on one device."""
    torch.manual_seed(0)
    made = _causal(
        "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2,
        **{**_LLAMA, "num_hidden_layers": 2},
    )()  # fmt: skip
    return fxpart.compile(
        made.model, cluster(1, 1e9), example_inputs=made.batch, optimizer="adamw", check="off"
    )


def plan(bandwidth: float = 1e8, count: int = 2, **constraints: int | str) -> Plan:
    """The plan on so many devices."""
    return program().replan(cluster(count, bandwidth), constraints=constraints).plan


def expert_degrees(made: Plan) -> set[tuple[int, int, int]]:
    """Data, tensor and expert degree of the stages."""
    return {(s.data_parallel, s.tensor_parallel, s.expert_parallel) for s in made.stages}


def test_experts_are_distributed_where_that_is_faster() -> None:
    free, replicated = plan(**ONE_STAGE, dp=2), plan(**ONE_STAGE, dp=2, ep=1)
    assert expert_degrees(free) == {(2, 1, 2)}
    assert expert_degrees(replicated) == {(2, 1, 1)}
    assert free.prediction.step_seconds < replicated.prediction.step_seconds
    assert free.degrees is not None and "experts over 2" in free.degrees.over
    assert "ep2" in str(free)


def test_what_the_plan_reports_reproduces_it() -> None:
    free = plan(**ONE_STAGE, dp=2)
    mesh: dict[str, int | str] = {"mesh": "dp=2", "zero": free.stages[0].zero, "stages": 1}
    for given in (mesh, {**ONE_STAGE, "ep": 2}, {**ONE_STAGE, "dp": 2, "ep": 2}):
        fixed = plan(**given)
        assert expert_degrees(fixed) == {(2, 1, 2)}, given
        assert fixed.prediction.step_seconds == pytest.approx(free.prediction.step_seconds)


@pytest.mark.parametrize("given", [{"forbid": "ep"}, {"forbid": "ep=2"}, {"ep": 1}])
@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_replicated_experts_on_request(given: dict[str, int | str], mesh: str) -> None:
    fixed = {"mesh": mesh} if mesh else ONE_STAGE
    assert all(expert == 1 for _, _, expert in expert_degrees(plan(**fixed, **given)))


def test_degrees_that_do_not_divide_the_experts() -> None:
    assert all(e == 1 for _, _, e in expert_degrees(plan(count=3, **ONE_STAGE)))
    with pytest.raises(FxpartError, match="FXP20"):
        plan(count=3, ep=3)
    with pytest.raises(FxpartError, match="FXP109"):
        plan(count=4, mesh="dp=4", ep=2)


def test_never_slower_than_without() -> None:
    for bandwidth in (1e7, 1e9, 1e11):
        for count in (2, 4):
            free = plan(bandwidth, count).prediction.step_seconds
            without = plan(bandwidth, count, ep=1).prediction.step_seconds
            assert free <= without * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "zero"), [(1, 0), (2, 2), (1, 3)])
def test_selected_expert_parallelism_trains_like_one_process(stages: int, zero: int) -> None:
    made = program().replan(
        cluster(2 * stages, 1e8),
        constraints={"mesh": "dp=2", "ep": 2, "stages": stages, "zero": zero, "microbatches": 2},
    )
    assert expert_degrees(made.plan) == {(2, 1, 2)}
    assert "experts_dispatched" in made.sources[0]
    found = made.verify(steps=2)
    assert found.passed and found.largest <= 1e-6


@pytest.mark.parametrize("given", [{}, {"ep": 2}])
def test_an_axis_for_experts_is_what_the_user_wants(given: dict[str, int | str]) -> None:
    made = plan(count=4, mesh="dp=2,ep=2", **given)
    assert expert_degrees(made) == {(2, 2, 1)}
