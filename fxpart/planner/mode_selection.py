"""Synchronous, asynchronous or queues: the plan of the mode that was asked for, or the faster.

Asynchronous training leaves out updates that are under way, which a step's time cannot tell the
worth of; so it is never chosen unless somebody asks for it, or asks for it to be weighed.
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
from fxpart.planner.prediction.asynchronous_plan import against, cost_in_staleness
from fxpart.planner.prepared_model import PreparedModel
from fxpart.planner.request import PlanRequest
from fxpart.planner.search import find_best_plan

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

_ONE = "the best asynchronous plan has one stage, which misses no update: it is synchronous"


@dataclass(frozen=True)
class ModeSelection:
    """What was decided, and the request that it answers: of the mode that was taken."""

    decided: PlanSearchResult
    request: PlanRequest


@reduce_garbage_collection()
def select_mode(
    front: PreparedModel,
    microbatches: int | None,
    progress: Callable[[Progress], None] | None = None,
) -> ModeSelection:
    """The plan of the request's mode; "auto" takes the one whose simulated step is shorter.

    Its provenance says under "mode" why; the best plan of the other mode is its first alternative,
    where both were looked for. Raises FXP2xx where nothing fits, FXP109 where the mode "async" and
    ZeRO are asked for.
    """
    request = front.request
    if request.mode == "sync":
        return ModeSelection(
            find_best_plan(
                _with(front, as_synchronous(request.constraints)), microbatches, progress
            ),
            request,
        )

    def of(constraints: Found) -> ModeSelection:
        mine = _with(front, constraints)
        return ModeSelection(find_best_plan(mine, microbatches, progress), mine.request)

    family = find_family(MODE_FAMILIES, request)
    if family is not None:

        def search(part: PreparedModel) -> PlanSearchResult:
            return find_best_plan(part, microbatches, progress)

        found = family.plan(ModelContext(front, microbatches, search))
        kept = replace(request, constraints=as_synchronous(request.constraints))
        return ModeSelection(found, kept)
    if request.mode == ASYNC:
        _check(request)
        stream = of(as_asynchronous(request.constraints))
        if len(stream.decided.plan.stages) > 1:
            return _told(
                stream, request, f"async, as asked; {cost_in_staleness(stream.decided.plan)}"
            )
        return _told(of(as_synchronous(request.constraints)), request, f"sync: {_ONE}")
    return _better(
        request, lambda: of(as_synchronous(request.constraints)), lambda: _stream(request, of)
    )


def request_of(request: PlanRequest, plan: Plan) -> PlanRequest:
    """The request that a plan found for it answers: of the mode that was taken."""
    if request.mode == "sync":
        return request
    of = as_asynchronous if plan.schedule == ASYNC else as_synchronous
    return replace(request, constraints=of(request.constraints))


def _stream(request: PlanRequest, of: Callable[[Found], ModeSelection]) -> ModeSelection:
    """The best asynchronous plan; FXP2xx or FXP109 where there is none."""
    _check(request)
    return of(as_asynchronous(request.constraints))


def _better(
    request: PlanRequest,
    synchronous: Callable[[], ModeSelection],
    asynchronous: Callable[[], ModeSelection],
) -> ModeSelection:
    """Of both modes the one that is faster by simulation."""
    step = _attempt(synchronous)
    stream = _attempt(asynchronous)
    if isinstance(stream, FxpartError):
        if isinstance(step, FxpartError):
            raise step
        why = stream.problems[0].why.splitlines()[0]
        return _told(step, request, f"sync: no asynchronous plan can be had: {why}")
    plan = stream.decided.plan
    if isinstance(step, FxpartError):
        if len(plan.stages) < 2:
            raise step
        return _told(stream, request, f"async: no synchronous plan fits; {cost_in_staleness(plan)}")
    other = step.decided.plan
    if len(plan.stages) < 2:
        return _told(step, request, f"sync: {_ONE}")
    if plan.prediction.expected_seconds < other.prediction.expected_seconds:
        words = f"async is faster by simulation; {cost_in_staleness(plan)}"
        return _told(stream, request, words, other)
    return _told(step, request, "sync: an asynchronous plan is not faster by simulation", plan)


def _attempt(make: Callable[[], ModeSelection]) -> ModeSelection | FxpartError:
    """What it makes, or why there is none."""
    try:
        return make()
    except FxpartError as fault:
        return fault


def _told(
    found: ModeSelection, request: PlanRequest, words: str, other: Plan | None = None
) -> ModeSelection:
    """With why, with the wishes as they were, and with the other mode's plan as an alternative."""
    plan = found.decided.plan
    alternatives = plan.alternatives
    if other is not None:
        alternatives = (against(plan, other), *alternatives)[: max(5, len(alternatives))]
    told = msgspec.structs.replace(
        plan,
        constraints=dict(request.constraints),
        provenance={**plan.provenance, "mode": words},
        alternatives=alternatives,
    )
    return replace(found, decided=replace(found.decided, plan=told))


def _check(request: PlanRequest) -> None:
    """FXP109 for a ZeRO level, whose ranks would have to meet for an update."""
    levels = str(request.constraints.get("zero", request.zero)).split(",")
    if request.zero or "0" not in [level.strip() for level in levels]:
        raise error(
            "FXP109",
            where=f"mode={request.mode}, zero={','.join(levels)}",
            why="an asynchronous stage updates at once, with an optimizer of its own on each rank",
            fix="zero=0, or mode=sync",
        )


def _with(front: PreparedModel, constraints: Found) -> PreparedModel:
    return replace(front, request=replace(front.request, constraints=constraints))
