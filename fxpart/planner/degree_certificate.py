"""The certificate of selected degrees, and the alternatives that were rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpart.plan.model import Alternative, Certificate, Plan
from fxpart.planner.degree_proposal import DegreeSearchResult, MeshProposal
from fxpart.planner.execution_mode import ASYNC
from fxpart.planner.prediction.alternatives import AlternativeComparison
from fxpart.solver.joint.objective import JointScorer, uniform_degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.problem import RECOMPUTE_MODES

_SAME = 1e-9  # Relative difference of equal estimates.


def make_degree_certificate(
    chosen: DegreeSearchResult, plan: Plan, ratios: Sequence[float], estimate: float
) -> Certificate:
    """Return the certificate of the selected degrees, over the costs of single blocks.

    ratios: exact step times of the meshes that were lowered, by their estimates. estimate: that of
    the plan's own mesh, which is not the lowest where exact step times are in another order. Where
    the plan's exact step time is below the bound over estimates, the bound is that time and proves
    nothing.
    """
    problem, solution = chosen.problem, chosen.solution
    lowest, exact = solution.objective, plan.prediction.step_seconds
    objective = max(lowest, estimate)
    bound = min(solution.bound, lowest, exact)
    first = objective <= lowest * (1 + _SAME) and bound == min(solution.bound, lowest)
    status = solution.status if first else "best found"
    assert status in ("optimal", "within gap", "best found"), "there is a choice"
    counts = ", ".join(map(str, problem.microbatches))
    found = sorted({uniform_degrees(problem, i) for i in range(len(problem.options))})
    words = ", ".join(f"{d}x{t}" for d, t in dict.fromkeys((d, t) for d, t, *_ in found))
    if shards := sorted({one.shard_degree for one in found if one.shard_degree}):
        words += f", state sharded over {', '.join(map(str, shards))} of dp or all"
    if shared := sorted({one.context for one in found if one.context > 1}):
        words += f", sequences over {', '.join(map(str, shared))} ranks or one"
    if spread := sorted({one.expert for one in found if one.expert > 1}):
        words += f", experts over {', '.join(map(str, spread))} data-parallel ranks or none"
    if hosts := sorted({one.offload for one in found if one.offload != "none"}):
        words += f", offload {' or '.join(hosts)}" + (" or none" if len(hosts) > 1 else "")
    levels = ", ".join(map(str, sorted({one.zero for one in found})))
    schedules = ", ".join(problem.schedules)
    if ASYNC in problem.schedules:
        schedules += f" (weights {problem.weights}, weight prediction not included)"
    return Certificate(
        status=status,
        objective=objective,
        lower_bound=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        solver=solution.solver,
        over=(
            f"dp x tp of {words}, equal for all stages, ZeRO {levels}, {problem.min_stages} to "
            f"{problem.max_stages} stages, microbatches of {counts}, schedules "
            f"{schedules}{_describe_modes(problem)}, each block priced separately"
            f"{_describe_ratios(ratios)}"
        ),
    )


def _describe_modes(problem: JointProblem) -> str:
    """Return the modes of recomputation that were compared, for the certificate."""
    modes = {option.recompute for option in problem.options}
    if modes == {"none"}:
        return ""
    return f", recompute {' or '.join(m for m in RECOMPUTE_MODES if m in modes)} per stage"


def _describe_ratios(ratios: Sequence[float]) -> str:
    """Describe how far the exact prices of the lowered meshes are from their estimates."""
    if not ratios:
        return ""
    low, high = (f"{ratio:.0%}" for ratio in (min(ratios), max(ratios)))
    text = low if low == high else f"{low} to {high}"
    return f" (exact step times of the meshes that were lowered are {text} of these estimates)"


def find_rejected_choices(
    chosen: DegreeSearchResult,
    one: MeshProposal,
    plan: Plan,
    exact: Mapping[JointChoice, float],
) -> tuple[tuple[Alternative, ...], tuple[Alternative, ...]]:
    """Return the best rejected degrees, and single changes of the proposal.

    exact: step times of the choices whose meshes were lowered. Others are priced block by block,
    and scaled by the ratio of the plan's exact step time to the proposal's estimate.
    """
    scorer = JointScorer(chosen.problem)
    factor = plan.prediction.step_seconds / one.seconds if one.seconds > 0 else 1.0
    comparison = AlternativeComparison(
        scorer, one.choice, scorer.evaluate(one.choice), scale=factor, exact=exact
    )
    return comparison.candidates(chosen.solution), comparison.changes()
