"""Schedules and weight modes that users register, that a package adds, and that CONTRIBUTING adds.

The schedule is the one of the page, which no part of the product names.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contributing_diffs import patched, read_diffs
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.schedule.make import make
from fxpart.schedule.spec import SCHEDULES, ScheduleSpec, register_schedule
from fxpart.schedule.weight_modes import MODES, WeightMode, register_weight_mode

ROOT = Path(__file__).resolve().parents[2]
NAME = "eager-1f1b"
CODE = re.search(
    r"```python\n(import fxpart\n.*?)```",
    (ROOT / "fxpart/docs/custom_ops_and_passes.md").read_text(encoding="utf-8"),
    re.DOTALL,
)
DIFFS = read_diffs("fxpart/schedule/")
BATCH = (torch.randn(8, 16), torch.randint(0, 4, (8,)))

SCRIPT = f"""
import torch
from torch import nn
import fxpart

torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(16, 4))
program = fxpart.compile(
    model, "local:2", example_inputs=(torch.randn(8, 16), torch.randint(0, 4, (8,))),
    loss=nn.functional.cross_entropy, microbatches=4,
    constraints={{"mesh": "none", "stages": 2, "schedule": {NAME!r}}},
)
assert program.plan.schedule == {NAME!r}
assert program.verify(steps=2).exact
program.plan.dump("plan.json")
"""


@pytest.fixture
def registered() -> Iterator[ScheduleSpec]:
    """The schedule of the page, registered as the page does it."""
    assert CODE is not None
    found: dict[str, Any] = {}
    exec(CODE[1], found)
    yield found["EAGER"]
    SCHEDULES.unregister(NAME)


def model() -> nn.Sequential:
    """A few layers."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def compiled(**options: Any) -> fxpart.api.Program:
    """The model on two ranks."""
    return fxpart.compile(
        model(), "local:2", example_inputs=BATCH, loss=nn.functional.cross_entropy,
        microbatches=4, **options,
    )  # fmt: skip


def run(command: list[str], folder: Path, path: Path) -> str:
    """What a command prints with another folder first on the path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_registered_schedule_is_built_and_proved(registered: ScheduleSpec) -> None:
    made = make(NAME, range(3), 6, fxpart.schedule.dependence.chain(3))
    assert made.name == NAME and registered.in_flight(3, 6) == (5, 3, 1)
    assert list(SCHEDULES)[-1] == NAME and list(SCHEDULES)[:-1] == list(SCHEDULES.builtin)


@pytest.mark.slow
def test_registered_schedule_is_planned_and_trains_exactly(registered: ScheduleSpec) -> None:
    program = compiled(constraints={"mesh": "none", "stages": 2, "schedule": NAME})
    plan = program.plan
    assert plan.schedule == NAME and plan.problems() == () and plan.runnable == ()
    assert [row.in_flight for row in plan.prediction.ranks] == [3, 1]
    assert plan.prediction.method == "simulation"
    assert Plan.loads(plan.dumps()) == plan
    assert program.verify(steps=2).exact


@pytest.mark.slow
def test_registered_schedule_competes_with_others(registered: ScheduleSpec) -> None:
    wishes = {"mesh": "none", "stages": 2, "schedule": f"{NAME},1f1b"}
    found = compiled(constraints=wishes).plan
    alone = compiled(constraints={**wishes, "schedule": "1f1b"}).plan
    assert found.prediction.expected_seconds <= alone.prediction.expected_seconds


@pytest.mark.slow
def test_plan_of_a_schedule_that_is_not_registered(registered: ScheduleSpec) -> None:
    plan = compiled(constraints={"mesh": "none", "stages": 2, "schedule": NAME}).plan
    text = plan.dumps()
    SCHEDULES.unregister(NAME)
    try:
        with pytest.raises(FxpartError, match=f"Unknown schedule '{NAME}'") as caught:
            Plan.loads(text)
        assert caught.value.code == "FXP303"
    finally:
        register_schedule(registered)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "gpipe"},
        {"name": "a b"},
        {"name": "a,b"},
        {"build": None},
        {"order": ""},
        {"trains": False},
        {"flushes": False},
        {"in_flight_form": "asynchronous"},
    ],
)
def test_schedule_that_cannot_be_registered(change: dict[str, Any]) -> None:
    given = {"name": "mine", "order": "mine", "build": SCHEDULES["gpipe"].build, **change}
    with pytest.raises(FxpartError, match="FXP109"):
        register_schedule(ScheduleSpec(**given))
    assert tuple(SCHEDULES) == SCHEDULES.builtin


def test_only_a_spec_is_registered() -> None:
    with pytest.raises(FxpartError, match="not a function"):
        register_schedule(lambda ranks, microbatches: None)  # type: ignore[arg-type, return-value]


@pytest.mark.slow
def test_registered_weight_mode_is_planned_and_trained() -> None:
    mode = WeightMode("mean-v2", look_forward="staleness", rule="decaying", forward_reads="ahead")
    register_weight_mode(mode)
    try:
        program = compiled(mode="async", weights="mean-v2", constraints={"stages": 2})
        assert (program.plan.weights, program.plan.schedule) == ("mean-v2", "async")
        assert Plan.loads(program.plan.dumps()) == program.plan
        trainer = program.trainer(functools.partial(torch.optim.SGD, lr=0.1))
        first = trainer.fit([BATCH]).loss
        assert trainer.fit([BATCH] * 8).loss < first
        assert trainer.weight_mode is mode
    finally:
        MODES.unregister("mean-v2")


@pytest.mark.parametrize(
    "mode",
    [
        WeightMode("stash", forward_reads="x"),
        WeightMode("a b", forward_reads="x"),
        WeightMode("mine"),
        WeightMode("mine", flush=True, forward_reads="x"),
    ],
)
def test_weight_mode_that_cannot_be_registered(mode: WeightMode) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        register_weight_mode(mode)


@pytest.mark.slow
def test_package_adds_a_schedule_for_all_processes(tmp_path: Path) -> None:
    """Planned and trained in one process, read in another, shown by the command line."""
    assert CODE is not None
    code = CODE[1].replace("fxpart.register_schedule(EAGER)\n", "")
    (tmp_path / "eager_package.py").write_text(code)
    info = tmp_path / "eager_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager_package\nVersion: 1.0\n")
    points = f"[fxpart.schedules]\n{NAME} = eager_package:EAGER\n"
    (info / "entry_points.txt").write_text(points)
    run([sys.executable, "-c", SCRIPT], tmp_path, tmp_path)
    tool = [sys.executable, "-m", "fxpart"]
    assert NAME in run([*tool, "explain", "plan.json"], tmp_path, tmp_path)
    shown = run([*tool, "schedule", "validate", NAME, "-s", "3", "-m", "6"], tmp_path, tmp_path)
    assert f"{NAME}: 3 stages on 3 ranks, 6 microbatches: valid" in shown
    assert "in flight at most, by stage: 5, 3, 1" in shown


def test_diffs_of_contributing_are_short() -> None:
    assert len(DIFFS) == 2
    assert all(len(diff.splitlines()) < 30 for diff in DIFFS)


@pytest.mark.slow
def test_diff_of_contributing_adds_a_schedule(tmp_path: Path) -> None:
    source = patched(DIFFS[:1], tmp_path / "source")
    tool = [sys.executable, "-m", "fxpart"]
    shown = run([*tool, "schedule", "validate", NAME, "-s", "3", "-m", "6"], tmp_path, source)
    assert "in flight at most, by stage: 5, 3, 1" in shown
    rows = "from fxpart.schedule.spec import document_rows; print(*document_rows())"
    assert f"| `{NAME}` |" in run([sys.executable, "-c", rows], tmp_path, source)
    run([sys.executable, "-c", SCRIPT], tmp_path, source)
    assert NAME in run([*tool, "explain", "plan.json"], tmp_path, source)


@pytest.mark.slow
def test_diff_of_contributing_adds_a_weight_mode(tmp_path: Path) -> None:
    source = patched(DIFFS[1:], tmp_path / "source")
    sizes = ["async", "-s", "3", "-m", "6", "--weights", "stash-decay"]
    tool = [sys.executable, "-m", "fxpart", "schedule"]
    said = run([*tool, "validate", *sizes], tmp_path, source)
    assert "the version of stash-decay; 1 microbatch per update" in said
