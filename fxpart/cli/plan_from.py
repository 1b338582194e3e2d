"""``fxpart plan --from``: price what another engine runs today, and say what would be faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fxpart import units
from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest
from fxpart.errors import FxpartError

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.interop.engines import EngineRun
    from fxpart.plan.model import Plan

# Its decision is not feasible or contradictory; anything else is an error of the command.
_INFEASIBLE = ("FXP201", "FXP202", "FXP204", "FXP205")
BY_BLOCKS = "The configuration is priced block by block, because fxpart cannot train it."


@dataclass(frozen=True)
class EngineComparison:
    """A configuration of an engine beside the best plan of the same step.

    today: None where the configuration has no feasible plan; why: the reason.
    """

    source: str
    engine: str
    run: EngineRun
    today: Plan | None
    why: str
    best: Program

    @property
    def speedup(self) -> float | None:
        """Step time of the configuration divided by that of the best plan."""
        if self.today is None:
            return None
        best = self.best.plan.prediction.expected_seconds
        return self.today.prediction.expected_seconds / best if best else None


def compare_with(request: CommandLineRequest, source: str) -> EngineComparison:
    """Plan the request with the decisions of a configuration file, and without them."""
    from fxpart.interop.engines import read_configuration
    from fxpart.planner.request import find_cluster
    from fxpart.solver.joint.constraints.block_names import find_layer_blocks

    spec, given = read_configuration(source)
    run = given.resolve(len(find_cluster(request.cluster, None).devices))
    workload = request.workload()
    precision = str(run.constraints.get("precision", "fp32"))
    same = replace(
        request,
        batch_size=request.batch_size or run.batch_size,
        precision=request.precision or precision,
    )
    best = same.compile(workload)
    run = run.with_stages(len(find_layer_blocks(best.costed().blocks)))
    fixed = tuple(f"{k}={v}" for k, v in run.constraints.items() if k not in _OWN_OPTIONS)
    layout = run.constraints.get("layout")
    constrained = replace(
        same, constraint=fixed, fix=(), forbid=(), stage=(), mesh=None, zero=None, mode=None,
        layout=None if layout is None else str(layout),
    )  # fmt: skip
    today, why = None, ""
    try:
        today = best.replan(constrained.cluster, constraints=constrained.constraints,
                            cost_model=constrained.cost_model).plan  # fmt: skip
    except FxpartError as refused:
        if refused.code not in _INFEASIBLE:
            raise
        why = refused.problems[0].why
        if refused.code == "FXP202":
            today = _price_by_blocks(best, constrained)
            run = run if today is None else replace(run, lost=(*run.lost, BY_BLOCKS))
    return EngineComparison(source, spec.name, run, today, why, best)


def _price_by_blocks(program: Program, constrained: CommandLineRequest) -> Plan | None:
    """Return what the requested decisions take by the prices of single blocks, trained or not."""
    from fxpart.planner.degrees import price_decisions
    from fxpart.planner.request import find_cluster, make_request

    request = make_request(
        find_cluster(constrained.cluster, None), program.optimizer, constrained.cost_model,
        constrained.constraints, program.plan.seed,
    )  # fmt: skip
    try:
        return price_decisions(request, program.captured, program.prepared, program.plan.model)
    except FxpartError as refused:
        if refused.code not in _INFEASIBLE:
            raise
        return None


_OWN_OPTIONS = ("precision", "layout")


def print_comparison(found: EngineComparison, as_json: bool) -> None:
    """Print both plans, the speedup and what is not priced."""
    if as_json:
        output.data(_data(found))
        return
    best, today = found.best.plan, found.today
    output.text(f"{found.source}: {found.engine}, {best.batch_size} rows per step on "
                f"{best.cluster.name}")  # fmt: skip
    rows = [("today", today), ("best", best)]
    for name, plan in rows:
        output.text(f"  {name:<6} {_describe(plan) if plan else f'does not fit: {found.why}'}")
    speedup = found.speedup
    if speedup is not None and today is not None and speedup > 1.005:
        gain = today.prediction.expected_seconds - best.prediction.expected_seconds
        output.text(f"  The best plan is {speedup:.2f} times as fast: {units.seconds(gain)} less "
                    "per step.")  # fmt: skip
    elif speedup is not None:
        output.text("  No faster plan was found.")
    for sentence in found.run.lost:
        output.text(f"lost: {sentence}")


def _describe(plan: Plan) -> str:
    """Return degrees, schedule, stages, step time and throughput of a plan on one line."""
    from fxpart.plan.summary import describe_schedule, describe_stages, format_rate

    seconds = plan.prediction.expected_seconds
    rate = f", {format_rate(plan.batch_size / seconds)} samples/s" if seconds else ""
    return (
        f"{units.seconds(seconds)}{rate}: {describe_stages(plan)}, {describe_schedule(plan)}, "
        f"{units.plural(plan.microbatches, 'microbatch')}"
    )


def _data(found: EngineComparison) -> dict[str, Any]:
    """Return the comparison as plain data."""
    from fxpart.plan.diff import diff

    best = found.best.plan
    changes = () if found.today is None else diff(found.today, best)
    today = found.today
    return {
        "source": found.source,
        "engine": found.engine,
        "constraints": dict(found.run.constraints),
        "batch_size": best.batch_size,
        "today": None if today is None else today.prediction.expected_seconds,
        "why": found.why,
        "best": best.prediction.expected_seconds,
        "speedup": found.speedup,
        "changes": [change for change in changes if change.kind == "decision"],
        "lost": found.run.lost,
    }
