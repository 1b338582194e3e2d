"""One step time: every number of that name is the same in every report, for every golden plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_calls import call
from golden_plans import CASES, program_of
from pages import Page

from fxpart import Program, units
from fxpart.errors import FxpartError
from fxpart.planner.whatif import choice_of
from fxpart.solver.archive import get_problem_path, save_problem

QUICK = ("chain_layers", "mesh_zero_1", "async_spectrain")
PLANS = [name for name in CASES if not name.startswith("refused")]
TIME = r"[\d.e-]+ (?:s|ms|µs|ns)\b"
COMMANDS = ("explain", "simulate", "report", "diff", "whatif")


def shown(text: str) -> Iterator[str]:
    """Each time that a text calls the step time, both of a comparison."""
    for match in re.finditer(rf"(?:step time|\n  step)\s+({TIME})(?: -> ({TIME}))?", text):
        yield from filter(None, match.groups())


def stored(data: Any) -> Iterator[float]:
    """Each number under the key "step_time", at any depth."""
    if isinstance(data, list):
        for item in data:
            yield from stored(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            if key == "step_time" and isinstance(value, dict):
                yield from value.values()
            elif key == "step_time":
                yield value
            else:
                yield from stored(value)


def arguments(name: str, path: Path, program: Program) -> list[str]:
    """The arguments of a command, whose files are written first."""
    plan = str(path / "plan.json")
    if name == "diff":
        other = msgspec.structs.replace(program.plan, seed=program.plan.seed + 1)
        other.dump(path / "other.json")
        return [name, plan, str(path / "other.json")]
    if name == "report":
        return [name, plan, "-o", str(path / "report.html")]
    if name == "whatif":
        save_problem(program.costed(), get_problem_path(plan))
        return [name, plan, "--latency", "2x", "--time-limit", "0.5"]
    return [name, plan]


def answers(program: Program) -> bool:
    """Whether `fxpart whatif` answers for the plan: some schedules and replicas have no problem."""
    try:
        choice_of(program.costed(), program.plan)
    except FxpartError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in PLANS]
)
def test_every_report_has_one_step_time(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = program_of(name)
    wanted = program.plan.prediction.expected_seconds
    program.plan.dump(tmp_path / "plan.json")
    for command in COMMANDS if answers(program) else COMMANDS[:-1]:
        given, status = arguments(command, tmp_path, program), int(command == "diff")
        text, _ = call(capsys, *given, status=status)
        if command == "report":
            text = " ".join(Page((tmp_path / "report.html").read_text()).words)
        data, _ = call(capsys, *given, "--json", status=status)
        times, numbers = list(shown(text)), list(stored(json.loads(data)))
        assert times and set(times) == {units.seconds(wanted)}, (command, times)
        assert numbers and set(numbers) == {wanted}, (command, numbers)
        assert not re.search(rf"(?<!optimizer )(?<!\n  )\bstep +{TIME}", text), (command, text)
    for text in (repr(program), repr(program.plan)):
        assert list(shown(text)) == [units.seconds(wanted)]
        assert len(text.splitlines()) <= 20
    for html in (program._repr_html_(), program.plan._repr_html_()):
        assert list(shown(" ".join(Page(html).words))) == [units.seconds(wanted)]


@pytest.mark.slow
def test_whatif_answers_for_a_chain() -> None:
    """The test above compares its step time."""
    assert answers(program_of("chain_layers"))


@pytest.mark.parametrize("field", ["rehearsed_seconds", "corrected_seconds"])
def test_trial_runs_come_before_the_simulation(field: str) -> None:
    plan = program_of("chain_layers").plan
    prediction = msgspec.structs.replace(plan.prediction, **{field: 1.0})
    assert "step time        1.00 s predicted" in repr(
        msgspec.structs.replace(plan, prediction=prediction)
    )
