"""Random layouts of models of every kind give the numbers of the module as written.

Each case draws a model, a layout (mesh, stages, schedule, ZeRO, recomputation, replicas, or what
the planner selects), batches of any size, and an optimizer; the run may continue from a checkpoint
under another layout. Refusals are allowed where the error says why.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from layout_runs import (
    batches_of,
    compile_case,
    difference,
    plan_layout,
    read_run,
    train_layouts,
    train_on_ranks,
    train_plain,
)
from random_layouts import LayoutCase, draw_case
from ranks import Pool
from zoo import ZOO

from fxpart.api import Program
from fxpart.errors import FxpartError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ZOO["gpt2"].available, reason="needs transformers"),
]
# Codes of layouts that a model or a batch does not have.
REFUSED = {"FXP105", "FXP109", "FXP111", "FXP114", "FXP202", "FXP204"}
GROUP = 10


def planned(case: LayoutCase) -> dict[str, Program] | None:
    """The programs of the case's layouts; None where one is refused."""
    _, base = compile_case(case)
    try:
        programs = {"layout": plan_layout(base, case.layout)}
        if case.moved is not None:
            programs["moved"] = plan_layout(base, case.moved)
    except FxpartError as fault:
        codes = {problem.code for problem in fault.problems}
        assert codes <= REFUSED and all(p.why and p.fix for p in fault.problems), (case, fault)
        return None
    assert not [problem for each in programs.values() for problem in each.plan.problems()], case
    return programs


def compared(case: LayoutCase, folder: Path, pool: Pool | None = None) -> str:
    """ "equal", "refused" or what differs; with a pool on ranks over gloo."""
    programs = planned(case)
    if programs is None:
        return "refused"
    model, _ = compile_case(case)
    batches = batches_of(case)
    if pool is None:
        found = train_layouts(case, model, programs, batches, folder)
    else:
        (ranks,) = {program.plan.world for program in programs.values()}
        plans = {name: program.plan.dumps() for name, program in programs.items()}
        first, *others = pool.run(
            train_on_ranks,
            case.number,
            case.dtype,
            plans,
            str(folder),
            ranks=ranks,
            timeout=400.0,
        )
        assert others == [b""] * (ranks - 1)
        found = read_run(first)
    last = programs.get("moved", programs["layout"])
    wanted = train_plain(case, model, [programs["layout"], last, last], batches)
    return difference(case, model, found, wanted) or "equal"


def check(cases: list[LayoutCase], folder: Path, pool: Pool | None = None) -> None:
    """Assert that all cases are equal or refused, and most of them equal."""
    cases.sort(key=lambda case: (case.model, case.layers, case.dropout, case.length))
    outcomes = {}
    for case in cases:
        mine = folder / str(case.number)
        mine.mkdir()
        outcomes[str(case)] = compared(case, mine, pool)
    wrong = {name: found for name, found in outcomes.items() if found not in ("equal", "refused")}
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    assert Counter(outcomes.values())["equal"] >= len(cases) / 2, outcomes


@pytest.mark.parametrize("number", [5, 63, 106, 126])
def test_few(number: int, tmp_path: Path) -> None:
    """Small models, in `make test`."""
    case = draw_case(number)
    assert compared(case, tmp_path) == "equal", case


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 200, GROUP))
def test_two_hundred(first: int, tmp_path: Path) -> None:
    check([draw_case(number) for number in range(first, first + GROUP)], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("first", range(1000, 1020, GROUP))
def test_other_dtypes(dtype: str, first: int, tmp_path: Path) -> None:
    check([draw_case(number, dtype) for number in range(first, first + GROUP)], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(2000, 2020, 5))
def test_over_gloo(first: int, tmp_path: Path, pool: Pool) -> None:
    check([draw_case(number, ranks=4) for number in range(first, first + 5)], tmp_path, pool)
