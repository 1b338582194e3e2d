"""Autocast in bfloat16 and transfers in bfloat16: real dtypes, the numbers of one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fxpart.passes import PREPARE, all_passes
from precision_models import Tiny, loss, tiny, words
from ranks import Pool
from torch import nn
from zoo import ZOO

import fxpart
from fxpart.api import Program
from fxpart.capture import capture
from fxpart.compiler import PassManager
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.training.trainer_factory import load_trainer
from fxpart.verification.verification_result import relative

pytestmark = pytest.mark.slow  # whole models are captured
STAGES = 3


@cache
def made(precision: str = "fp32", transfer_dtype: str = "") -> Program:
    """The tiny model on three stages; compiled once for all tests."""
    return tiny(STAGES, precision=precision, transfer_dtype=transfer_dtype)


def sent(program: Program) -> list[tuple[str, str]]:
    """Name and dtype of what comes to each stage from others."""
    return [
        (value.name, value.dtype)
        for stage in program.spec.stages
        for value, source in zip(stage.inputs, stage.sources, strict=True)
        if source >= 0
    ]


def test_boundaries_have_the_dtypes_of_autocast() -> None:
    plain, half = made(), made("bf16")
    assert {dtype for _, dtype in sent(plain)} == {"float32"}
    assert "bfloat16" in {dtype for _, dtype in sent(half)}
    assert all(s.dtype == "float32" for stage in half.spec.stages for s in stage.state)
    assert half.plan.precision == "bf16" and plain.plan.precision == "fp32"
    activations = [
        sum(rank.memory.activations for rank in p.plan.prediction.ranks) for p in (plain, half)
    ]
    assert activations[1] < activations[0]


def test_equal_to_one_process_under_autocast() -> None:
    """Bit for bit to the whole graph; to the user's own module under autocast within rounding."""
    found = made("bf16").verify(steps=2)
    assert found.passed and found.equal and found.exact
    assert found.eager_loss is not None and found.eager_loss < 1e-6
    assert found.eager_gradient is not None and found.eager_gradient < 1e-6


def test_the_reference_is_torch_under_autocast() -> None:
    """No code of fxpart on the other side: torch.autocast, backward, AdamW."""
    torch.manual_seed(0)
    model, (ids, targets) = Tiny(dropout=0.0), words()
    program = tiny(2, model, precision="bf16", microbatches=1)
    trainer = program.trainer(lambda p: torch.optim.AdamW(p, lr=0.01))
    mine = [float(trainer.step((ids, targets))) for _ in range(3)]
    optimizer, theirs = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model(ids), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(value))
    trainer.close()
    assert mine == theirs


def _train(folder: str, state: bytes) -> list[float]:
    weights = safetensors.torch.load(state)
    trainer = load_trainer(folder, "sgd", weights=lambda name, _: weights[name], timeout=30)
    losses = [float(trainer.step(words())) for _ in range(2)]
    trainer.close()
    return losses


@pytest.mark.parametrize("options", [("bf16", ""), ("fp32", "bfloat16")])
def test_ranks_have_the_numbers_of_one_process(
    pool: Pool, options: tuple[str, str], tmp_path: Path
) -> None:
    program = made(*options)
    program.export(tmp_path)
    alone = program.trainer("sgd")
    state = {n: t.detach().clone() for n, t in program.captured.state.items()}
    wanted = [float(alone.step(words())) for _ in range(2)]
    alone.close()
    found = pool.run(_train, str(tmp_path), safetensors.torch.save(state), ranks=STAGES)
    assert found == [wanted] * STAGES


def test_no_grad_inside_of_autocast_stays() -> None:
    """torch.export forgets it; the teacher would be trained."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                goal = torch.tanh(self.teacher(x))
            return ((self.student(x) - goal) ** 2).mean()

    captured = capture(Teacher(), (torch.randn(4, 4),), precision="bf16")
    graph = PassManager(all_passes()).run(PREPARE, captured.graph)
    value = graph(0, torch.randn(4, 4))[0]
    value.backward()
    assert captured.state["student.weight"].grad is not None
    assert captured.state["teacher.weight"].grad is None


def test_a_model_without_data_has_the_same_graph() -> None:
    with torch.device("meta"):
        empty = Tiny()
    found = tiny(STAGES, empty, precision="bf16")
    assert found.sources == made("bf16").sources


def test_a_model_in_bfloat16_altogether() -> None:
    torch.manual_seed(0)
    found = tiny(STAGES, Tiny().bfloat16())
    assert {dtype for _, dtype in sent(found)} == {"bfloat16"}
    result = found.verify(steps=2)
    assert result.passed and result.equal


def test_the_plan_says_it_and_is_followed(tmp_path: Path) -> None:
    program = made("bf16", "bfloat16")
    program.plan.dump(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.precision, plan.transfer_dtype) == ("bf16", "bfloat16")
    again = tiny(STAGES, plan=plan, microbatches=None)
    assert again.sources == program.sources and again.spec == program.spec
    with pytest.raises(FxpartError, match="FXP305"):
        tiny(STAGES, plan=plan, precision="fp32", microbatches=None)
    with pytest.raises(FxpartError, match="FXP304"):  # the graph of another precision
        changed = Plan.loads(plan.dumps().replace('"precision": "bf16"', '"precision": "fp32"'))
        tiny(STAGES, plan=changed, microbatches=None)
    assert made("bf16").replan("local:2", microbatches=4).plan.precision == "bf16"
    with pytest.raises(FxpartError, match="captured in bf16"):
        made("bf16").replan("local:2", constraints={"precision": "fp32"})


def test_an_older_plan_is_as_before() -> None:
    raw = json.loads(made().plan.dumps())
    del raw["precision"], raw["transfer_dtype"], raw["actions"]
    raw["version"] = 4
    plan = Plan.loads(json.dumps(raw))
    assert (plan.precision, plan.transfer_dtype) == ("fp32", "")


@pytest.mark.parametrize("name", ["fp16", "float16", "int8"])
def test_other_precisions_are_refused(name: str) -> None:
    with pytest.raises(FxpartError) as found:
        tiny(2, precision=name)
    assert found.value.problems[0].code == "FXP109"
    assert "bf16" in found.value.problems[0].fix
    with pytest.raises(FxpartError, match="FXP109"):
        capture(Tiny(), words(), loss=loss, precision=name)


def test_the_page_gives_the_code_and_the_cause_that_are_printed() -> None:
    page = (Path(fxpart.__file__).parent / "docs" / "converting_a_script.md").read_text("utf-8")
    with pytest.raises(FxpartError) as found:
        tiny(2, precision="fp16")
    problem = found.value.problems[0]
    assert f"float16 is refused ({problem.code}) because it needs loss scaling" in page
    assert problem.why.startswith("float16 needs loss scaling")


def test_rounded_transfers_equal_one_process_that_rounds() -> None:
    found = made("fp32", "bfloat16").verify(steps=2)
    assert found.passed and found.equal
    assert found.eager_loss is not None and found.eager_gradient is not None


def test_rounded_transfers_are_near_exact_ones() -> None:
    """Each crossing rounds to 8 bits, relative 2**-9; gradients, state and sums of ties do not."""
    wanted, near = made(), made("fp32", "bfloat16")
    gradients = []
    for program in (wanted, near):
        trainer = program.trainer("sgd")
        trainer.backward(words())
        gradients.append(trainer.gradients())
        trainer.close()
    differences = {n: relative(gradients[1][n], g) for n, g in gradients[0].items()}
    assert 0 < max(differences.values()) < 16 * 2**-9
    assert all(g.dtype == torch.float32 for g in gradients[1].values())


def test_the_price_is_of_the_bytes_that_are_sent() -> None:
    """Half the seconds beyond the latency, and all the memory: what arrives is float32 again."""
    exact, half = (p.plan.prediction.ranks for p in (made(), made("fp32", "bfloat16")))
    assert [r.stage for r in exact] == [r.stage for r in half]
    assert [r.memory for r in exact] == [r.memory for r in half]
    link = made().plan.cluster.links[0]
    for before, after in zip(exact[1:], half[1:], strict=True):
        saved = before.transfer_seconds - after.transfer_seconds
        latency = 2 * after.transfer_seconds - before.transfer_seconds
        assert saved > 0 and abs(latency / link.latency - round(latency / link.latency)) < 1e-6


WITH_ZOO = ("transformer", "side_mask", "frozen", "dropouts", "many_ways", "regions")


@pytest.mark.parametrize("name", WITH_ZOO)
def test_the_zoo_under_autocast(name: str) -> None:
    entry = ZOO[name]
    if not entry.available:
        pytest.skip(f"{name} needs {entry.needs}")
    built = entry.build()
    program = fxpart.compile(
        built.model, "local:3", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, microbatches=2, precision="bf16",
        constraints={"stages": 2, "mesh": "none"}, batch_coupling=entry.coupling,
    )  # fmt: skip
    found = program.verify(steps=1)
    assert found.passed and found.equal, found
    assert found.eager_gradient is not None and found.eager_gradient <= max(entry.tolerance, 1e-6)


def test_what_converts_inside_itself_is_refused() -> None:
    built = ZOO["lstm"].build()
    with pytest.raises(FxpartError, match="FXP108") as found:
        fxpart.compile(
            built.model, "local:2", example_inputs=built.batch, loss=built.loss, precision="bf16"
        )
    assert "enabled=False" in found.value.problems[0].fix
