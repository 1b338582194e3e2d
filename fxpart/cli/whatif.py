"""``fxpart whatif``: a plan on a changed cluster or with changed decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import EXIT_INFEASIBLE, FxpartError, error

if TYPE_CHECKING:
    from fxpart.planner.whatif import WhatIfResult


_NO_DEGREES = "the changed problem does not allow the parallel degrees of its stages"


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
@click.option(
    "--devices", default="", metavar="N", help="Number of devices: 6, or by type: h100=6,a100=2."
)
@click.option(
    "--without", type=click.IntRange(0), multiple=True, metavar="RANK",
    help="Remove the device of this rank; may be repeated.",
)  # fmt: skip
@click.option("--bandwidth", callback=_factor, metavar="FACTOR", help="Factor of all links: 0.5x.")
@click.option("--latency", callback=_factor, metavar="FACTOR", help="Factor of all links: 2x.")
@click.option("--memory", callback=_factor, metavar="FACTOR", help="Factor of all devices: 0.5x.")
@click.option(
    "--microbatches", "-m", multiple=True, type=click.IntRange(1), help="Number of microbatches."
)
@click.option("--fix", multiple=True, metavar="KEY=VALUE", help="Fix a decision, such as tp=2.")
@click.option("--forbid", multiple=True, metavar="KEY[=VALUE]", help="Forbid one: recompute.")
@click.option("--problem", type=click.Path(), help="The costed problem, if not beside the plan.")
@click.option("--time-limit", type=click.FloatRange(0), default=30.0, show_default=True)
@json_option
def command(plan: str, problem: str | None, time_limit: float, as_json: bool, **given: Any) -> int:
    """Estimate PLAN after a change, and plan again for it.

    Estimates are closed forms over the block costs that `fxpart plan` wrote beside the plan
    (plan.problem.json); only the step time of PLAN itself is the plan's own prediction. Costs that
    the change needs and the file does not have are listed.
    """
    from fxpart.plan.model import Plan
    from fxpart.planner.whatif import WhatIfChange, solve_whatif
    from fxpart.solver.archive import get_problem_path, load_joint_problem
    from fxpart.solver.joint.constraints.parse import parse_constraint

    loaded = Plan.load(plan)
    costed = load_joint_problem(problem or get_problem_path(plan))
    constraints = [parse_constraint("fix", text) for text in given.pop("fix")]
    constraints += [parse_constraint("forbid", text) for text in given.pop("forbid")]
    found = solve_whatif(
        costed, loaded, WhatIfChange(**given, constraints=tuple(constraints)), time_limit=time_limit
    )
    step_time = loaded.prediction.expected_seconds
    if as_json:
        output.data(_data(found, step_time))
    else:
        output.text("\n".join(_lines(found, step_time)))
    if found.after is None:
        _explain(found)
        return EXIT_INFEASIBLE
    return 0


def _explain(found: WhatIfResult) -> None:
    from fxpart.solver.joint.infeasible import explain_joint_infeasible

    output.note(str(FxpartError(explain_joint_infeasible(found.problem))))


def _lines(found: WhatIfResult, step_time: float) -> list[str]:
    """Return the plan, the change, and the estimates of both plans after it."""
    from fxpart.units import percent, seconds

    before = found.before.seconds

    def compare(value: float) -> str:
        return f"{seconds(value)} ({value / before - 1:+.1%})" if before > 0 else seconds(value)

    lines = [
        f"plan          step time {seconds(step_time)} predicted",
        *(f"{'':<14}{row}" for row in found.was),
        f"change        {found.change}",
        "Closed-form estimates from the block costs of the problem file",
        *(f"  not priced  {text}" for text in found.unpriced),
        f"  this plan   {seconds(before)} before the change",
    ]
    kept = found.kept
    if kept is not None and kept.feasible:
        lines.append(f"              {compare(kept.seconds)} after the change")
    else:
        why = kept.faults[0] if kept is not None and kept.faults else _NO_DEGREES
        lines.append(f"              infeasible after the change: {why}")
    if found.after is None:
        return [*lines, "  new plan    none is feasible"]
    bound = found.solution.bound
    gap = percent(max(0.0, 1 - bound / found.after.seconds)) if found.after.seconds else "0.0 %"
    lines.append(
        f"  new plan    {compare(found.after.seconds)}, {found.solution.status}, lower bound "
        f"{seconds(bound)}, gap {gap}"
    )
    if found.was == found.now:
        return [*lines, f"{'':<14}the same decisions"]
    return [*lines, *(f"{'':<14}{row}" for row in found.now)]


def _data(found: WhatIfResult, step_time: float) -> dict[str, Any]:
    """Return the result as data.

    ``seconds`` are on the scale of the plan's own step time: closed-form estimates, times the ratio
    of the plan's step time to its estimate.
    """
    kept, after = found.kept, found.after
    scale = step_time / found.before.seconds if found.before.seconds > 0 else 1.0
    fits = kept is not None and kept.feasible
    return {
        "change": str(found.change),
        "unpriced": found.unpriced,
        "step_time": step_time,
        "before": {
            "seconds": step_time,
            "closed_form_seconds": found.before.seconds,
            "decisions": found.was,
        },
        "kept": {
            "seconds": kept.seconds * scale if kept is not None and fits else None,
            "closed_form_seconds": kept.seconds if kept is not None and fits else None,
            "faults": kept.faults if kept is not None else (_NO_DEGREES,),
        },
        "again": {
            "status": found.solution.status,
            "seconds": after.seconds * scale if after is not None else None,
            "closed_form_seconds": after.seconds if after is not None else None,
            "lower_bound": found.solution.bound if after is not None else None,
            "decisions": found.now,
        },
    }
