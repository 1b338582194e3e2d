"""Samples/s, tokens/s, TFLOP/s and MFU of plans, and when they are not known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import sample_plans
import torch
from torch import nn

import fxpart
from fxpart.plan.model import Plan, PlanInput
from fxpart.plan.summary import summarize
from fxpart.plan.throughput import ModelWork, Throughput, compute_throughput
from fxpart.report.explanation_text import explain


class Language(nn.Module):
    """An embedding and a head, whose products are easy to count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).mean(1)


def with_input(plan: Plan, *shape: int | str, dtype: str = "int64") -> Plan:
    """The plan with another first input."""
    first = PlanInput(name="tokens", dtype=dtype, shape=shape, batch_dim=0)
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, inputs=(first,)))


def with_work(plan: Plan, *work: Any, **how: Any) -> Plan:
    """The plan of a model that computes as much for each sample."""
    model = msgspec.structs.replace(plan.model, work=ModelWork(*work, **how))
    return msgspec.structs.replace(plan, model=model)


def test_figures_by_hand() -> None:
    plan = sample_plans.plan(4)  # 16 samples of 64 tokens on 4 devices of 50 GFLOP/s
    step = plan.prediction.simulated_seconds
    found = compute_throughput(with_work(plan, 1e9 / 16))
    assert found.samples_per_second == pytest.approx(16 / step)
    assert found.tokens_per_second == pytest.approx(16 * 64 / step)
    assert found.tflops_per_device == pytest.approx(1e9 / step / 4 / 1e12)
    assert found.mfu == pytest.approx(1e9 / step / (4 * 50e9))
    assert found.notes == ()


def test_mfu_above_all_published_ones_is_a_warning() -> None:
    plan = sample_plans.plan(4)
    gpus = tuple(
        msgspec.structs.replace(device, kind="gpu", model="h100-sxm")
        for device in plan.cluster.devices
    )
    plan = msgspec.structs.replace(
        plan, cluster=msgspec.structs.replace(plan.cluster, devices=gpus)
    )
    step = plan.prediction.simulated_seconds
    peak = sum(plan.device(rank).flops["float32"] for rank in range(4))
    low, high = (
        compute_throughput(with_work(plan, share * step * peak / 16)) for share in (0.48, 0.7)
    )
    assert low.notes == ()
    assert "70% is above the highest published for GPUs of the hopper" in high.notes[0]


def test_plans_of_earlier_versions_have_no_flops() -> None:
    found = compute_throughput(sample_plans.plan())
    assert found.mfu is None and found.tflops_per_device is None
    assert "plan again to count" in found.notes[0]


def test_a_length_that_is_a_symbol() -> None:
    plan = with_input(sample_plans.plan(), "s0", "s1")
    assert "sequence length of tokens is the symbol s1" in compute_throughput(plan).notes[0]
    known = compute_throughput(with_work(plan, 1e9, {"s1": 8}))
    assert known.tokens_per_second == pytest.approx(8 * (known.samples_per_second or 0))


@pytest.mark.parametrize(("shape", "dtype"), [(("s0", 8), "float32"), (("s0",), "int64")])
def test_models_without_tokens_have_samples_only(shape: tuple[int | str, ...], dtype: str) -> None:
    plan = with_work(with_input(sample_plans.plan(), *shape, dtype=dtype), 1.0)
    found = compute_throughput(plan)
    assert found == Throughput(samples_per_second=found.samples_per_second)


def test_a_peak_that_is_not_known() -> None:
    found = compute_throughput(with_work(sample_plans.plan(), 1e9, dtype="bfloat16"))
    assert found.mfu is None and found.tflops_per_device is not None
    assert found.notes == ("MFU is not known: cpu has no peak FLOP/s for bfloat16.",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "weights", "precision", "computed"),
    [
        (4, torch.float32, "fp32", "float32"),
        (8, torch.bfloat16, "fp32", "bfloat16"),
        (8, torch.float32, "bf16", "bfloat16"),
    ],
)
def test_flops_of_a_program(rows: int, weights: torch.dtype, precision: str, computed: str) -> None:
    """Forward plus twice as many: 2 * 16 * 32 FLOPs of the head's product for each token."""
    example = (torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    program = fxpart.compile(
        Language().to(weights), "1x2xa100", batch_size=rows, loss=nn.functional.cross_entropy,
        precision=precision, example_inputs=example,
    )  # fmt: skip
    assert program.plan.batch_size == rows
    work = program.plan.model.work
    assert work is not None and work.flops == 3 * 5 * 2 * 16 * 32
    peak = sum(program.plan.device(rank).flops[computed] for rank in range(program.plan.world))
    found, step = compute_throughput(program.plan), program.plan.prediction
    assert found.mfu == pytest.approx(rows * work.flops / step.expected_seconds / peak)
    assert "tokens/s" in repr(program) and "MFU" in repr(program)
    assert "MFU" in explain(Plan.loads(program.plan.dumps()))


def test_large_plans_have_short_summaries() -> None:
    plan = sample_plans.plan(40, 3)
    name = "x" * 500
    text = summarize(
        msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, name=name))
    )
    assert len(text.splitlines()) <= 20 and all(len(line) < 200 for line in text.splitlines())
