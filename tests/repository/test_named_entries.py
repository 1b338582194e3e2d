"""Names of schedules and weight modes are written once, and each entry is complete."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from built_schedules import BUILDERS
from cli_calls import call
from structure import all_nodes_of

from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.constraints import find_constraint_problems
from fxpart.schedule.action import FORWARD, ActionKind
from fxpart.schedule.dependence import chain
from fxpart.schedule.spec import FOUND, SCHEDULES
from fxpart.schedule.weight_modes import MODES
from fxpart.solver.schedule_costs import count_stage_in_flight

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join(
    (ROOT / "fxpart/docs" / name).read_text(encoding="utf-8")
    for name in ("schedules.md", "asynchronous_training.md")
)
# These are words of their own too: of a computation, of a message between ranks.
ORDINARY = {FORWARD, FOUND}
NAMES = [name for name in (*SCHEDULES.builtin, *MODES.builtin) if name not in ORDINARY]


def docstrings(nodes: Sequence[ast.AST]) -> set[int]:
    """The nodes of a module's docstrings."""
    bodies = (getattr(node, "body", None) for node in nodes)
    firsts = (body[0] for body in bodies if isinstance(body, list) and body)
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def literals() -> list[tuple[str, str]]:
    """The file and the text of each string of the product, without docstrings."""
    found = []
    for folder in ("fxpart", "passes", "costmodels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = all_nodes_of(path)
            skipped = docstrings(nodes)
            found += [
                (path.relative_to(ROOT).as_posix(), node.value)
                for node in nodes
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                if id(node) not in skipped
            ]
    return found


def test_each_name_is_written_once() -> None:
    """As the whole of a string, and where a name is no ordinary word as a part of one."""
    telling = [name for name in NAMES if re.search(r"\d|-", name)]
    telling += ["gpipe", "interleaved", "spectrain", "pipeoptim", "xpipe", "pipemare", "lookahead"]
    part = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, telling))})(?![\w-])")
    # The builders' `__all__` lists functions; the table's texts may compare modes.
    ours = [
        (file, text)
        for file, text in literals()
        if not (file.endswith("builders/__init__.py") and text.isidentifier())
    ]
    whole = Counter(text for _, text in ours if text in NAMES)
    assert whole == Counter(NAMES)
    tables = ("fxpart/schedule/builders/", "fxpart/schedule/weight_modes.py")
    assert [
        (file, text) for file, text in ours if part.search(text) and not file.startswith(tables)
    ] == []


@pytest.mark.parametrize("name", SCHEDULES.builtin)
def test_schedule_entry_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = SCHEDULES[name]
    assert spec.name == name and spec.order and spec.row() in PAGE
    sizes = ["-s", "4", "-m", "4"]
    if spec.build is None:
        with pytest.raises(FxpartError, match="FXP109"):
            spec(4, 4)
    else:
        assert f"{name}: 4 stages" in call(capsys, "schedule", "validate", name, *sizes)[0]
    accepted = not find_constraint_problems({"schedule": name})
    listed = name in Plan.schema()["$defs"]["Plan"]["properties"]["schedule"]["enum"]
    assert accepted == listed == spec.trains


@pytest.mark.parametrize("name", BUILDERS)
def test_schedule_entry_says_what_is_built(name: str) -> None:
    spec = SCHEDULES[name]
    ranks = spec.assign_ranks(4, spec.count_stages_per_rank(2))
    built = spec(ranks, 6)
    kinds = {action.kind for actions in built.ranks for action in actions}
    assert built.name == name
    assert spec.trains == bool(kinds & {ActionKind.B, ActionKind.W})
    assert spec.splits_backward == (ActionKind.W in kinds)
    if spec.in_flight_form is not None and not spec.is_virtual:
        forms = [count_stage_in_flight(name, 6, 4, stage) for stage in range(4)]
        assert list(spec.in_flight(4, 6)) == forms
    if spec.warmup is not None:
        ahead = [
            next(k for k, action in enumerate(actions) if action.kind is ActionKind.B)
            for actions in built.ranks
        ]
        assert [min(6, most) for most in spec.warmup(4, 6, chain(4))] == ahead
    if spec.supports_replicas:
        assert spec(4, 6, replicas=((0, 1),)).replicas == ((0, 1),)
    else:
        with pytest.raises(FxpartError, match="FXP109"):
            spec(4, 6, replicas=((0, 1),))
    assert not spec.supports_queues or spec.supports_replicas


@pytest.mark.parametrize("name", MODES.builtin)
def test_weight_mode_entry_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mode = MODES[name]
    assert mode.name == name
    assert f"| `{name}` | {mode.forward_reads} | {mode.backward_reads} |" in PAGE
    assert mode.forward_reads and mode.backward_reads
    sizes = ["-s", "2", "-m", "4", "--weights", name, "--every", "2"]
    assert "valid" in call(capsys, "schedule", "validate", "async", *sizes)[0]
    accepted = not find_constraint_problems({"mode": "async", "weights": name})
    assert accepted == (not mode.flush)
    assert name in Plan.schema()["$defs"]["Plan"]["properties"]["weights"]["enum"]
