"""The table of constraints: complete, consistent, listed, and the only place of their names."""

from __future__ import annotations

import ast

import pytest
from cli_calls import call
from structure import ROOT, nodes_of, sources, text_of

from fxpart.errors import FxpartError
from fxpart.plan.constraint_table import (
    CONSTRAINTS,
    DECISIONS,
    DEGREES,
    describe_constraints,
    get_decision,
)
from fxpart.planner.constraints import find_constraint_problems
from fxpart.solver.joint.constraints.parse import parse_constraint, parse_constraints

APPLY = ROOT / "fxpart/solver/joint/constraints/apply.py"


def test_entries_are_consistent() -> None:
    for name, spec in CONSTRAINTS.items():
        assert spec.name == name and spec.summary.endswith(".") and len(spec.summary) < 90
        assert not spec.same_as or CONSTRAINTS[spec.same_as].is_decision
        assert not spec.needs or spec.needs.partition("=")[0] in CONSTRAINTS
        if spec.kind in ("choice", "words"):
            choices = spec.list_choices()
            assert choices and all(map(spec.accepts, choices)) and not spec.accepts("nonsense")
        assert not spec.plain or spec.is_decision
        if spec.plain and spec.kind == "words":
            assert spec.accepts(spec.plain)
    assert set(DEGREES) < set(DECISIONS)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_each_is_checked_by_its_kind(name: str) -> None:
    """A wrong value gives FXP109 that names the constraint; a right one gives none."""
    spec = CONSTRAINTS[name]
    entries = {"forbid": "tp=2", "stage": "a=0", "layout": "t|t"}
    examples = {
        "text": "dp=2", "count": 2, "seconds": 1.0, "staleness": "1", "numbers": 2,
        "choice": spec.list_choices()[-1:], "words": spec.list_choices()[-1:],
        "entries": entries.get(name),
    }  # fmt: skip
    right = examples[spec.kind]
    right = right[0] if isinstance(right, tuple) else right
    if spec.same_as and spec.kind == "text":
        right = 2
    around = {"mesh": "dp=2"} if spec.needs == "mesh" else {}
    around |= {"mode": "queue"} if name == "staleness" else {}
    around |= {"mode": "async"} if name == "weights" else {}
    around |= {"mode": "auto"} if name == "staleness_penalty" else {}
    around |= {"schedule": "interleaved"} if name == "virtual" else {}
    right = "stash" if name == "weights" else right
    right = "gpipe" if name == "schedule" else right
    assert not find_constraint_problems({**around, name: right})
    wrong: object = 3.5 if spec.kind in ("text", "entries") else "-nonsense-"
    problems = find_constraint_problems({**around, name: wrong})  # type: ignore[dict-item]
    assert {problem.code for problem in problems} == {"FXP109"}
    assert any(name in problem.where or spec.same_as in problem.where for problem in problems)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("recompte", "recompute"),
        ("micro_batches", "microbatches"),
        ("Mesh", "mesh"),
        ("zeroo", "zero"),
    ],
)
def test_an_unknown_name_gives_the_nearest(wrong: str, nearest: str) -> None:
    (problem,) = find_constraint_problems({wrong: 1})
    assert problem.code == "FXP109" and wrong in problem.where
    assert problem.fix.startswith(f"{nearest!r}, the nearest name")
    assert all(name in problem.fix for name in CONSTRAINTS)
    (problem,) = find_constraint_problems({"%%": 1})
    assert problem.fix.startswith("one of ")


def test_an_unknown_decision_gives_the_nearest() -> None:
    with pytest.raises(FxpartError, match=r"Use 'recompute', the nearest name") as caught:
        parse_constraint("fix", "recomput=full")
    assert caught.value.problems[0].code == "FXP109"
    with pytest.raises(FxpartError, match=r"'cut', the nearest name"):
        parse_constraint("forbid", "cuts=layers.1")


def test_synonyms_are_decisions() -> None:
    for name, spec in CONSTRAINTS.items():
        if spec.same_as:
            (found,) = parse_constraints({name: 2})
            assert found.key == spec.same_as and get_decision(name) is get_decision(found.key)


def test_the_help_of_plan_lists_every_constraint(capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "plan", "--help")[0].split("Constraints:")[1]
    rows = describe_constraints()
    assert [line.split()[0] for line in out.splitlines() if line[:3].strip()] == [
        n for n, _ in rows
    ]


@pytest.mark.slow
def test_every_name_that_is_read_is_in_the_table() -> None:
    """A constraint that some module reads and the table does not know fails here."""
    read = set()
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Subscript):
                owner, key = node.value, node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr != "get" or not node.args:
                    continue
                owner, key = node.func.value, node.args[0]
            else:
                continue
            if isinstance(key, ast.Constant) and text_of(owner).split(".")[-1] == "constraints":
                read.add(key.value)
    assert len(read) > 10
    assert read <= set(CONSTRAINTS)


def test_no_other_table_of_constraints() -> None:
    """Four or more names of constraints in one literal collection stand in the table only."""
    named = set(CONSTRAINTS) - {"m", "data", "stage", "tensor", "expert", "weights", "layout"}
    wrong = []
    for path in sources():
        # The second has the order in which the joint solver's objective returns degrees.
        if path in (ROOT / "fxpart/plan/constraint_table.py", APPLY):
            continue
        for node in nodes_of(path):
            if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
                texts = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                if len(texts) == len(node.elts) and len(texts) > 3 and named.issuperset(texts):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
