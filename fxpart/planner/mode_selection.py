"""Select the execution mode and return its best plan.

Asynchronous training computes with stale weights, which step time does not account for. It is
therefore selected only if the user requests it or requests the mode "auto". With a measured
staleness penalty, "auto" compares the predicted time to its target loss instead of step time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fxpart.compiler.garbage_collection import reduce_garbage_collection
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Plan
from fxpart.plan.offload import AUTO
from fxpart.plan.staleness_penalty import ModeCandidate, StalenessPenalty
from fxpart.planner.constraints import list_fixed
from fxpart.planner.execution_mode import ASYNC, Found, as_asynchronous, as_synchronous
from fxpart.planner.families import MODE_FAMILIES, find_family
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prediction.asynchronous_plan import as_alternative, describe_staleness
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.request import PlanRequest
from fxpart.planner.search import find_best_plan
from fxpart.planner.time_to_loss import (
    describe_choice,
    describe_later,
    explain_unknown_penalty,
    list_pipelines,
    make_candidate,
)
from fxpart.solver.remedies import is_solved_by_offload

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

_STEP_TIME_ALONE = "step time alone was compared, as no staleness_penalty is given"
_ONE = "the best asynchronous plan has one stage, which is synchronous training"


@dataclass(frozen=True)
class ModeSelection:
    """The plan, and the request with the constraints of the selected mode."""

    result: PlanSearchResult
    request: PlanRequest


@reduce_garbage_collection()
def select_mode(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None = None,
) -> ModeSelection:
    """Return the plan of the request's mode; "auto" selects the shorter simulated step.

    With a staleness penalty, "auto" selects the shortest time to its target loss. The plan's
    provenance has the reason under "mode"; where several modes were planned, the best rejected plan
    is the first alternative. Raises FXP2xx where nothing fits, FXP109 where the mode "async" is
    combined with ZeRO.
    """
    request = front.request
    if request.mode == "sync":
        mine = _with_constraints(front, as_synchronous(request.constraints))
        return ModeSelection(_plan_in_memory(mine, microbatches, progress), request)

    def of(constraints: Found, **more: int | str) -> ModeSelection:
        mine = _with_constraints(front, {**constraints, **more})
        kept = replace(request, constraints=constraints)
        return ModeSelection(find_best_plan(mine, microbatches, progress), kept)

    family = find_family(MODE_FAMILIES, request)
    if family is not None:

        def search(part: PreparedModel) -> PlanSearchResult:
            return find_best_plan(part, microbatches, progress)

        found = family.plan(ModelContext(front, microbatches, search))
        kept = replace(request, constraints=as_synchronous(request.constraints))
        return ModeSelection(found, kept)
    if request.mode == ASYNC:
        _check(request)
        asynchronous_plan = of(as_asynchronous(request.constraints))
        if len(asynchronous_plan.result.plan.stages) > 1:
            return _with_reason(
                asynchronous_plan,
                request,
                f"async, as requested; {describe_staleness(asynchronous_plan.result.plan)}",
            )
        one_stage = of(as_synchronous(request.constraints), stages=1, copies="none")
        return _with_reason(one_stage, request, f"sync: {_ONE}")

    def plan_synchronous() -> ModeSelection:
        return of(as_synchronous(request.constraints))

    if request.penalty is None:
        return _select_faster(request, plan_synchronous, lambda: _plan_asynchronous(request, of))

    def plan_pipeline(weights: str, stages: int) -> ModeSelection:
        kept = as_asynchronous({**request.constraints, "weights": weights})
        pinned = {**{key: kept[key] for key in kept if key != "pp"}, "stages": stages}
        mine = replace(_with_constraints(front, pinned).request, stages=(stages, stages))
        found = find_best_plan(replace(front, request=mine), microbatches, progress)
        return ModeSelection(found, replace(request, constraints=kept))

    return _select_sooner(front, microbatches, request.penalty, plan_synchronous, plan_pipeline)


def _plan_in_memory(
    front: PreparedModel, microbatches: int | None, progress: Callable[[Progress], None] | None
) -> PlanSearchResult:
    """Return the best synchronous plan; with offload to host memory where nothing fits without.

    Not where the constraint offload is given.
    """
    given = dict(front.request.constraints)
    try:
        return find_best_plan(front, microbatches, progress)
    except FxpartError as fault:
        if "offload" in given or not is_solved_by_offload(fault.problems):
            raise
    offloaded = _with_constraints(front, {**given, "offload": AUTO})
    found = find_best_plan(offloaded, microbatches, progress)
    source = f"{found.plan.provenance.get('offload', '')}; nothing fits without".removeprefix("; ")
    sources = {**found.plan.provenance, "offload": source}
    plan = msgspec.structs.replace(found.plan, constraints=given, provenance=sources)
    return replace(found, plan=plan)


def request_of(request: PlanRequest, plan: Plan) -> PlanRequest:
    """Return the request with the constraints of the mode that the plan has."""
    if request.mode == "sync":
        return request
    if plan.schedule == ASYNC:
        chosen = as_asynchronous({**request.constraints, "weights": plan.weights})
        return replace(request, constraints=chosen)
    return replace(request, constraints=as_synchronous(request.constraints))


def _plan_asynchronous(request: PlanRequest, of: Callable[[Found], ModeSelection]) -> ModeSelection:
    """Return the best asynchronous plan; raises FXP2xx or FXP109 where there is none."""
    _check(request)
    return of(as_asynchronous(request.constraints))


def _select_faster(
    request: PlanRequest,
    plan_synchronous: Callable[[], ModeSelection],
    plan_asynchronous: Callable[[], ModeSelection],
) -> ModeSelection:
    """Return the mode with the shorter simulated step."""
    step = _attempt(plan_synchronous)
    asynchronous_plan = _attempt(plan_asynchronous)
    if isinstance(asynchronous_plan, FxpartError):
        if isinstance(step, FxpartError):
            raise step
        why = asynchronous_plan.problems[0].why.splitlines()[0]
        return _with_reason(step, request, f"sync: no asynchronous plan is possible: {why}")
    plan = asynchronous_plan.result.plan
    if isinstance(step, FxpartError):
        if len(plan.stages) < 2:
            raise step
        return _with_reason(
            asynchronous_plan,
            request,
            f"async: no synchronous plan fits; {describe_staleness(plan)}",
        )
    other = step.result.plan
    if len(plan.stages) < 2:
        return _with_reason(step, request, f"sync: {_ONE}")
    if plan.prediction.expected_seconds < other.prediction.expected_seconds:
        reason = f"async is faster by simulation; {describe_staleness(plan)}; {_STEP_TIME_ALONE}"
        return _with_reason(asynchronous_plan, request, reason, other)
    reason = f"sync: an asynchronous plan is not faster by simulation; {_STEP_TIME_ALONE}"
    return _with_reason(step, request, reason, plan)


def _select_sooner(
    front: PreparedModel,
    microbatches: int | None,
    penalty: StalenessPenalty,
    plan_synchronous: Callable[[], ModeSelection],
    plan_pipeline: Callable[[str, int], ModeSelection],
) -> ModeSelection:
    """Return the mode, weight mode and number of stages with the shortest time to the target loss.

    plan_pipeline: returns the best asynchronous plan of a weight mode and number of stages. Among
    equal times, synchronous training or the smallest delay is selected.
    """
    request = front.request
    made: list[tuple[ModeCandidate, ModeSelection]] = []
    unknown: list[ModeCandidate] = []
    step = _attempt(plan_synchronous)
    if not isinstance(step, FxpartError):
        made.append((make_candidate(step.result.plan, penalty), step))
    fixed = list_fixed(request.constraints, "microbatches")
    counts = (microbatches,) if microbatches is not None else fixed
    for weights, stages in list_pipelines(front, penalty):
        why = explain_unknown_penalty(request, penalty, weights, stages, counts)
        one = why or _attempt(partial(_plan_pipeline, request, plan_pipeline, weights, stages))
        if isinstance(one, ModeSelection):
            made.append((make_candidate(one.result.plan, penalty), one))
            continue
        why = one if isinstance(one, str) else one.problems[0].why.splitlines()[0]
        unknown.append(
            ModeCandidate(
                mode=ASYNC, weights=weights, stages=stages, microbatches=max(counts, default=1),
                why=why,
            )
        )  # fmt: skip
    if not made:
        assert isinstance(step, FxpartError), "the synchronous plan would be a candidate"
        raise step
    made.sort(key=lambda each: (each[0].seconds or 0.0, each[0].delay, each[0].stages))
    candidates = [candidate for candidate, _ in made]
    plan = made[0][1].result.plan
    found = _with_reason(
        made[0][1], request, describe_choice(candidates, penalty, plan),
        *(other.result.plan for _, other in made[1:2]),
        why=describe_later(candidates),
    )  # fmt: skip
    whole = msgspec.structs.replace(found.result.plan, modes=(*candidates, *unknown))
    return replace(found, result=replace(found.result, plan=whole))


def _plan_pipeline(
    request: PlanRequest,
    plan: Callable[[str, int], ModeSelection],
    weights: str,
    stages: int,
) -> ModeSelection:
    """Return the plan of a pipeline; raises FXP2xx or FXP109 where there is none."""
    _check(request)
    return plan(weights, stages)


def _attempt(make: Callable[[], ModeSelection]) -> ModeSelection | FxpartError:
    """Return the selection, or the error that was raised instead."""
    try:
        return make()
    except FxpartError as fault:
        return fault


def _with_reason(
    found: ModeSelection,
    request: PlanRequest,
    reason: str,
    other: Plan | None = None,
    *,
    why: str = "",
) -> ModeSelection:
    """Return the selection with its reason, the original constraints and the rejected plan.

    why: it was rejected, by default by its step time.
    """
    plan = found.result.plan
    alternatives = plan.alternatives
    if other is not None:
        alternatives = (as_alternative(plan, other, why), *alternatives)[
            : max(5, len(alternatives))
        ]
    plan = msgspec.structs.replace(
        plan,
        constraints=dict(request.constraints),
        provenance={**plan.provenance, "mode": reason},
        alternatives=alternatives,
    )
    return replace(found, result=replace(found.result, plan=plan))


def _check(request: PlanRequest) -> None:
    """Raise FXP109 for a ZeRO level, which requires ranks to synchronize at each update."""
    levels = str(request.constraints.get("zero", request.zero)).split(",")
    if request.zero or "0" not in [level.strip() for level in levels]:
        raise error(
            "FXP109",
            where=f"mode={request.mode}, zero={','.join(levels)}",
            why="in an asynchronous pipeline each rank updates on its own, with its own optimizer",
            fix="use zero=0 or mode=sync",
        )


def _with_constraints(front: PreparedModel, constraints: Found) -> PreparedModel:
    return replace(front, request=replace(front.request, constraints=constraints))
