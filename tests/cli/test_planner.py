"""fxpart plan with wishes, and fxpart whatif: what a user types and what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxpart import cli
from fxpart.plan.model import Plan
from fxpart.planner.whatif import choice_of
from fxpart.solver.archive import get_problem_path, load_joint_problem
from fxpart.solver.joint.objective import evaluate

TARGET = """
import torch
from torch import nn
import fxpart

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
        self.head = nn.Linear(64, 4)
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)

def net():
    torch.manual_seed(0)
    batch = torch.randn(8, 64), torch.randint(0, 4, (8,))
    return fxpart.Workload(Net(), example=batch, loss=nn.functional.cross_entropy)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a plan of four stages of it with its costed problem."""
    folder = tmp_path_factory.mktemp("planner")
    (folder / "target_of_planner.py").write_text(TARGET)
    status = cli.run(
        ["plan", f"{folder}/target_of_planner.py:net", "--cluster", "local:4", "--fix", "dp=1",
         "--fix", "tp=1", "--fix", "stages=4", "--mesh", "auto", "-o", str(folder / "plan.json")]
    )  # fmt: skip
    assert status == 0
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    found = cli.run(list(arguments))
    out, err = capsys.readouterr()
    assert found == status, out + err
    assert "Traceback" not in err
    return out if not status else out + err


def plan_of(
    capsys: pytest.CaptureFixture[str], folder: Path, *options: str, status: int = 0
) -> Any:
    target = f"{folder}/target_of_planner.py:net"
    return call(capsys, "plan", target, "--cluster", "local:4", "--mesh", "auto", "--json",
                *options, status=status)  # fmt: skip


@pytest.mark.slow
def test_the_costed_problem_lies_beside_the_plan(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    problem = load_joint_problem(get_problem_path(folder / "plan.json"))
    assert len(plan.stages) == 4 and plan.world == 4
    found = evaluate(problem, choice_of(problem, plan))
    assert found.seconds == pytest.approx(plan.prediction.step_seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "stages", "world"),
    [
        (("--fix", "dp=2", "--fix", "tp=1", "--fix", "stages=2"), 2, 4),
        (("--forbid", "dp", "--forbid", "tp", "--fix", "pp=3"), 3, 3),
        (("--layout", "tttt|ttt|tL"), 3, 3),
        (("--stage", "layers.0-3=0", "--stage", "head=-1", "--fix", "stages=2"), 2, None),
    ],
)
def test_wishes_are_options(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    options: tuple[str, ...],
    stages: int,
    world: int | None,
) -> None:
    plan = Plan.loads(plan_of(capsys, folder, *options))
    assert len(plan.stages) == stages and world in (None, plan.world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        (("--fix", "tp"), 2, "KEY=VALUE"),
        (("--fix", "tp=three"), 2, "whole number"),
        (("--forbid", "colour"), 2, "Unknown decision"),
        (("--stage", "nowhere=0"), 2, "No block matches"),
        (("--layout", "tt|"), 2, "Stage 1 is empty"),
        (("--layout", "tt|tt"), 2, "the model has 8"),
        (("--fix", "schedule=async", "--mode", "sync"), 2, "contradict each other"),
        (("--weights", "stash"), 2, "a synchronous plan has no weight mode"),
        (("--fix", "tp=5"), 3, "allow tp 1"),
        (("--fix", "ranks=64"), 3, "ranks"),
    ],
)
def test_a_wish_that_cannot_be_is_one_clear_error(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    options: tuple[str, ...],
    status: int,
    word: str,
) -> None:
    text = plan_of(capsys, folder, *options, status=status)
    assert any(part in text for part in word.split("|")), text


@pytest.mark.slow
def test_what_if(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    path = str(folder / "plan.json")
    text = call(capsys, "whatif", path, "--without", "3", "--bandwidth", "0.5x")
    assert "without rank 3" in text and "infeasible after the change" in text and "new plan" in text
    same = json.loads(call(capsys, "whatif", path, "--fix", "dp=1", "--fix", "tp=1", "--fix",
                           "stages=4", "--json"))  # fmt: skip
    assert same["before"]["seconds"] == same["step_time"]
    assert same["kept"] == {
        "seconds": pytest.approx(same["step_time"]),
        "closed_form_seconds": same["before"]["closed_form_seconds"],
        "faults": [],
    }
    assert same["again"]["closed_form_seconds"] == same["before"]["closed_form_seconds"]
    three = json.loads(call(capsys, "whatif", path, "--microbatches", "3", "--json"))
    assert three["again"]["decisions"][0].split(", ")[1] == "3 microbatches"


@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        (("--devices", "0"), 2, "at least one"),
        (("--devices", "gpu=4"), 2, "devices"),
        (("--without", "9"), 2, "no such rank"),
        (("--bandwidth", "fast"), 2, "factor"),
        (("--memory", "0x"), 2, "factor"),
        (("--microbatches", "99"), 2, "microbatches"),
        (("--fix", "speed=1"), 2, "Unknown decision"),
        (("--memory", "0.0000001x"), 3, "FXP204"),
        (("--problem", "nothing.json"), 2, "FXP206"),
    ],
)
def test_a_question_without_an_answer(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    options: tuple[str, ...],
    status: int,
    word: str,
) -> None:
    text = call(capsys, "whatif", str(folder / "plan.json"), *options, status=status)
    assert word in text


@pytest.mark.slow
def test_what_if_needs_neither_torch_nor_ortools(folder: Path) -> None:
    code = (
        "import sys\n"
        "from fxpart import cli\n"
        f"status = cli.run(['whatif', {str(folder / 'plan.json')!r}, '--devices', '3'])\n"
        "print(status, [m for m in ('torch', 'ortools', 'sympy') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
