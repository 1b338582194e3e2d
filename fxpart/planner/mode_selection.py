"""Select the execution mode and return its best plan.

Asynchronous training computes with stale weights, which step time does not account for. It is
therefore selected only if the user requests it or requests the mode "auto".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from fxpart.compiler.garbage_collection import reduce_garbage_collection
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Plan
from fxpart.planner.execution_mode import ASYNC, Found, as_asynchronous, as_synchronous
from fxpart.planner.families import MODE_FAMILIES, find_family
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prediction.asynchronous_plan import as_alternative, describe_staleness
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.request import PlanRequest
from fxpart.planner.search import find_best_plan

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

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

    The plan's provenance has the reason under "mode"; where both modes were planned, the best plan
    of the rejected mode is the first alternative. Raises FXP2xx where nothing fits, FXP109 where
    the mode "async" is combined with ZeRO.
    """
    request = front.request
    if request.mode == "sync":
        return ModeSelection(
            find_best_plan(
                _with_constraints(front, as_synchronous(request.constraints)),
                microbatches,
                progress,
            ),
            request,
        )

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
    return _select_faster(
        request,
        lambda: of(as_synchronous(request.constraints)),
        lambda: _plan_asynchronous(request, of),
    )


def request_of(request: PlanRequest, plan: Plan) -> PlanRequest:
    """Return the request with the constraints of the mode that the plan has."""
    if request.mode == "sync":
        return request
    of = as_asynchronous if plan.schedule == ASYNC else as_synchronous
    return replace(request, constraints=of(request.constraints))


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
        reason = f"async is faster by simulation; {describe_staleness(plan)}"
        return _with_reason(asynchronous_plan, request, reason, other)
    return _with_reason(
        step, request, "sync: an asynchronous plan is not faster by simulation", plan
    )


def _attempt(make: Callable[[], ModeSelection]) -> ModeSelection | FxpartError:
    """Return the selection, or the error that was raised instead."""
    try:
        return make()
    except FxpartError as fault:
        return fault


def _with_reason(
    found: ModeSelection, request: PlanRequest, reason: str, other: Plan | None = None
) -> ModeSelection:
    """Return the selection with its reason, the original constraints and the rejected plan."""
    plan = found.result.plan
    alternatives = plan.alternatives
    if other is not None:
        alternatives = (as_alternative(plan, other), *alternatives)[: max(5, len(alternatives))]
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
