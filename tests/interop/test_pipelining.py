"""torch.distributed.pipelining on fxpart's stages gives the numbers of fxpart's own step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from pipelining_programs import Answer, fxparts, torchs
from ranks import TESTS, Pool, torchrun
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.interop.chain_stage import boundaries
from fxpart.program.spec import ProgramSpec, ShardingSpec, StageSpec, ValueSpec

EXAMPLES = TESTS.parent / "examples"


def agree(answers: list[Answer], expected: Answer) -> None:
    losses, gradients, state = expected
    assert [loss for answer in answers for loss in answer[0]] == pytest.approx(losses, rel=1e-6)
    for _, own_gradients, own_buffers in answers:
        assert own_gradients
        for name, values in own_gradients.items():
            assert values == pytest.approx(gradients[name], rel=1e-4, abs=1e-7), name
        for name, values in own_buffers.items():
            if name in state:
                assert values == pytest.approx(state[name], rel=1e-5), name
    assert {name for answer in answers for name in answer[1]} == set(gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "schedules"),
    [
        ("language", [0, 1, 0, 1], ["ScheduleInterleaved1F1B"]),
        ("vision", [0, 1], ["Schedule1F1B", "ScheduleGPipe"]),
    ],
)
def test_torchs_schedules(pool: Pool, kind: str, ranks: list[int], schedules: list[str]) -> None:
    """Dropout's keys, a mask that skips stages, a tied weight, running statistics."""
    found = pool.run(torchs, kind, len(ranks), ranks, schedules, ranks=2, timeout=120)
    expected = fxparts(kind, len(ranks))
    for index in range(len(schedules)):
        agree([answers[index] for answers in found], expected)


def value(name: str, gradient: bool = True) -> ValueSpec:
    return ValueSpec(name=name, dtype="float32", shape=("s0", 4), requires_grad=gradient)


def hand(*takes: dict[str, int], **options: Any) -> ProgramSpec:
    """Stage i gives ``v<i>`` (the last one the loss) and takes these values from these stages."""
    stages = []
    for index, given in enumerate(takes):
        last = index == len(takes) - 1
        stages.append(
            StageSpec(
                index=index,
                inputs=tuple(value(name, source >= 0) for name, source in given.items()),
                sources=tuple(given.values()),
                outputs=(value("loss" if last else f"v{index}"),),
                targets=((),),
                state=(),
            )
        )
    given = {
        "loss": "loss",
        "inputs": (),
        "constants": (),
        "symbols": {},
        "outputs": (),
        "ties": {},
    }
    return ProgramSpec(stages=tuple(stages), **{**given, **options})


def test_what_skips_stages_is_handed_on() -> None:
    spec = hand({"x": -1}, {"v0": 0}, {"v1": 1}, {"v0": 0, "v2": 2, "y": -1})
    names = [[v.name for v in crossing] for crossing in boundaries(spec)]
    assert names == [["v0"], ["v1", "v0"], ["v0", "v2"]]


def test_a_gradient_flows_where_any_stage_behind_sends_one() -> None:
    spec = hand({"x": -1}, {"v0": 0}, {"v1": 1, "v0": 0})
    mask = msgspec.structs.replace(spec.stages[1], inputs=(value("v0", gradient=False),))
    spec = msgspec.structs.replace(spec, stages=(spec.stages[0], mask, spec.stages[2]))
    assert [[v.requires_grad for v in c] for c in boundaries(spec)] == [[True], [True, True]]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (hand({"x": -1}, {"y": -1}, {"v0": 0, "v1": 1}), "no input from stage 0, only user inputs"),
        (hand({"x": -1}, {"v0": 0}, {"v0": 0}), r"no input from stage 1, only from stages \[0\]"),
        (hand({"x": -1}, {"v0": 0}, loss="v0"), "not computed on the last stage"),
        (
            hand({"x": -1}, sharding=ShardingSpec(mesh="tp=2", inputs=(), placements={}, state={})),
            "each stage has several ranks",
        ),
    ],
)
def test_what_is_no_chain_is_refused(spec: ProgramSpec, why: str) -> None:
    with pytest.raises(FxpartError, match=why) as raised:
        boundaries(spec)
    assert {problem.code for problem in raised.value.problems} == {"FXP109"}


@pytest.mark.slow
def test_the_example_learns() -> None:
    """Each rank draws its own weights, no rank has them all; the tied weight stays one."""
    done = torchrun(EXAMPLES / "torch_pipelining.py", ranks=2)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 20
    assert losses[0] > 4.0
    assert losses[-1] < 0.1


def test_state_that_is_written_per_step_is_refused() -> None:
    """torch's schedules would write it per microbatch."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    batch = torch.randn(4, 4), torch.randn(4, 1)
    program = fxpart.compile(
        model, "local:2", example_inputs=batch, loss=nn.functional.mse_loss, microbatches=2,
        constraints={"mesh": "none", "stages": 2},
    )  # fmt: skip
    with pytest.raises(FxpartError, match="0.weight_u") as refused:
        program.to_pipeline_stages(ranks=[0, 1])
    assert refused.value.code == "FXP114"
