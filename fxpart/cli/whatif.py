"""``fxpart whatif``: the plan under other circumstances, without model or cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import EXIT_INFEASIBLE, FxpartError, error

if TYPE_CHECKING:
    from fxpart.planner.whatif import WhatIfResult


def _factor(_: click.Context, option: click.Parameter, text: str | None) -> float:
    """``0.5x``, ``x0.5`` or ``0.5`` as a factor above 0."""
    if text is None:
        return 1.0
    try:
        value = float(text.lower().strip("x"))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        fix = "write a factor such as 0.5x or 2x"
        where = f"--{option.name} {text[:40]}"
        raise error("FXP109", where=where, why="it is not a factor above 0", fix=fix)
    return value


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--devices", default="", metavar="N", help="How many: 6, or by type: h100=6,a100=2.")
@click.option(
    "--without", type=click.IntRange(0), multiple=True, metavar="RANK",
    help="The plan's rank whose device is gone; may be repeated.",
)  # fmt: skip
@click.option("--bandwidth", callback=_factor, metavar="FACTOR", help="Of all links, 0.5x.")
@click.option("--latency", callback=_factor, metavar="FACTOR", help="Of all links, 2x.")
@click.option("--memory", callback=_factor, metavar="FACTOR", help="Of all devices, 0.5x.")
@click.option("--microbatches", "-m", multiple=True, type=click.IntRange(1), help="Their number.")
@click.option("--fix", multiple=True, metavar="KEY=VALUE", help="Fix a decision, such as tp=2.")
@click.option("--forbid", multiple=True, metavar="KEY[=VALUE]", help="Forbid one: recompute.")
@click.option("--problem", type=click.Path(), help="The costed problem, if not beside the plan.")
@click.option("--time-limit", type=click.FloatRange(0), default=30.0, show_default=True)
@json_option
def command(plan: str, problem: str | None, time_limit: float, as_json: bool, **given: Any) -> int:
    """Say what PLAN would cost, and what would be planned, if something were other.

    The answer is over the costs and options of the problem that `fxpart plan` wrote beside the
    plan (plan.problem.json).
    """
    from fxpart.plan.model import Plan
    from fxpart.planner.whatif import WhatIfChange, solve_whatif
    from fxpart.solver.joint.archive import get_problem_path, load
    from fxpart.solver.joint.constraints.parse import parse_constraint

    loaded = Plan.load(plan)
    costed = load(problem or get_problem_path(plan))
    wishes = [parse_constraint("fix", text) for text in given.pop("fix")]
    wishes += [parse_constraint("forbid", text) for text in given.pop("forbid")]
    found = solve_whatif(
        costed, loaded, WhatIfChange(**given, wishes=tuple(wishes)), time_limit=time_limit
    )
    if as_json:
        output.data(_data(found))
    else:
        output.text("\n".join(_lines(found)))
    if found.after is None:
        _explain(found)
        return EXIT_INFEASIBLE
    return 0


def _explain(found: WhatIfResult) -> None:
    from fxpart.solver.joint.infeasible import explain_joint_infeasible

    output.note(str(FxpartError(explain_joint_infeasible(found.problem))))


def _lines(found: WhatIfResult) -> list[str]:
    """The answer for a person: before, the same plan after, and planned again."""
    from fxpart.units import seconds

    before = found.before.seconds

    def beside(value: float) -> str:
        return f"{seconds(value)} ({value / before - 1:+.1%})" if before > 0 else seconds(value)

    lines = [
        f"as planned     {seconds(before)} a step: {found.was[0]}",
        f"if             {found.change}",
    ]
    kept = found.kept
    if kept is not None and kept.feasible:
        lines.append(f"same plan      {beside(kept.seconds)}")
    else:
        why = kept.faults[0] if kept is not None and kept.faults else "its degrees are not there"
        lines.append(f"same plan      cannot be: {why}")
    if found.after is None:
        return [*lines, "planned again  nothing fits"]
    proof = f"{found.solution.status}, at least {seconds(found.solution.bound)}"
    lines.append(f"planned again  {beside(found.after.seconds)}, {proof}")
    if found.was == found.now:
        return [*lines, "               the same decisions"]
    lines += [f"{'':<15}{row}" for row in found.now]
    lines += [f"{'instead of' if not i else '':<15}{row}" for i, row in enumerate(found.was)]
    return lines


def _data(found: WhatIfResult) -> dict[str, Any]:
    kept, after = found.kept, found.after
    return {
        "change": str(found.change),
        "before": {"seconds": found.before.seconds, "decisions": found.was},
        "kept": {
            "seconds": kept.seconds if kept is not None and kept.feasible else None,
            "faults": kept.faults if kept is not None else ("its degrees are not there",),
        },
        "again": {
            "status": found.solution.status,
            "seconds": after.seconds if after is not None else None,
            "bound": found.solution.bound if after is not None else None,
            "decisions": found.now,
        },
    }
