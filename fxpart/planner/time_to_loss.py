"""Execution modes compared by predicted time to a target loss, with a measured staleness penalty.

The time of a candidate is its predicted step time, multiplied by its steps to the target loss
relative to synchronous training. The unit is the time of as many steps as synchronous training
needs, divided by that number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxpart import units
from fxpart.compat.optimizer_choice import describe_optimizer, has_options
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.model import Plan
from fxpart.plan.staleness_penalty import ModeCandidate, RelativeSteps, StalenessPenalty
from fxpart.planner.constraints import allowed_stages
from fxpart.planner.execution_mode import ASYNC, PENALTY
from fxpart.schedule.weight_modes import MODES

if TYPE_CHECKING:
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.request import PlanRequest

_FIX = "measure the penalty as the model is trained, or plan for what was measured"


def read_penalty(
    constraints: Mapping[str, int | float | str | bool], optimizer: Any, problems: list[Problem]
) -> StalenessPenalty | None:
    """Return the staleness penalty of the constraints, if it has one.

    Adds FXP109 where it cannot be read or was measured with another optimizer. Options such as the
    learning rate are compared if the optimizer is more than a name or a class.
    """
    if PENALTY not in constraints:
        return None
    try:
        found = StalenessPenalty.load(str(constraints[PENALTY]))
    except FxpartError as fault:
        problems += fault.problems
        return None
    given = "adamw" if optimizer is None else optimizer
    name, options = describe_optimizer(given)
    if name != found.optimizer:
        why = f"the penalty was measured with {found.optimizer}"
        problems.append(Problem("FXP109", f"{PENALTY}, optimizer={name}", why, _FIX))
    for key in sorted(options) if has_options(given) and name == found.optimizer else ():
        measured = found.options.get(key, options[key])
        if measured != options[key]:
            where = f"{PENALTY}, optimizer={name}, {key}={options[key]}"
            why = f"the penalty was measured with {key}={measured}"
            problems.append(Problem("FXP109", where, why, _FIX))
    return found


def compute_seconds_to_loss(
    plan: Plan, request: PlanRequest, seconds: float | None = None
) -> float:
    """Return the step time times the relative steps to the target loss; 1 without a penalty.

    seconds: the step time, if not the predicted one.
    """
    own = plan.prediction.expected_seconds if seconds is None else seconds
    if plan.schedule != ASYNC:
        return own
    return own * request.find_relative_steps(len(plan.firsts), plan.microbatches)


def list_pipelines(front: PreparedModel, penalty: StalenessPenalty) -> list[tuple[str, int]]:
    """Return the weight modes and numbers of stages to plan, from the constraints and the penalty.

    Raises FXP109 for a penalty of another batch size or without the requested weight mode.
    """
    request, batch = front.request, front.captured.batch_size
    weights = request.constraints.get("weights")
    where = why = ""
    if penalty.batch_size != batch:
        where = f"{PENALTY}, batch_size={batch}"
        why = f"the penalty was measured with batches of {penalty.batch_size} samples"
    elif weights is not None and weights not in penalty.modes:
        where = f"{PENALTY}, weights={weights}"
        why = f"the penalty was measured for {', '.join(penalty.modes)}"
    if why:
        raise error("FXP109", where=where, why=why, fix=_FIX)
    least, most = request.stages
    counts = allowed_stages(request.constraints, min(most, len(front.blocks)))
    return [
        (name, stages)
        for name in (penalty.modes if weights is None else (str(weights),))
        for stages in counts
        if stages >= max(2, least)
    ]


def explain_unknown_penalty(
    request: PlanRequest,
    penalty: StalenessPenalty,
    weights: str,
    stages: int,
    counts: Sequence[int],
) -> str:
    """Return why no number of microbatches has known relative steps; "" if one has, or may have.

    counts: the numbers of microbatches; none if they are not known yet.
    """
    own, _ = describe_optimizer(request.optimizer)
    measured, _ = penalty.get_optimizer(weights)
    trained = MODES[weights].optimizer if request.optimizer == "adamw" else ""
    if measured != (trained or own):
        return f"it was measured with {measured}, but {trained or own} trains"
    found = [penalty.find_relative_steps(weights, stages, count) for count in counts]
    reasons = [one for one in found if isinstance(one, str)]
    return reasons[-1] if reasons and len(reasons) == len(found) else ""


def make_candidate(plan: Plan, penalty: StalenessPenalty) -> ModeCandidate:
    """Return the candidate of a mode's best plan."""
    found, stages = RelativeSteps(1.0, None, "measured", 0.0), len(plan.firsts)
    if plan.schedule == ASYNC:
        known = penalty.find_relative_steps(plan.weights, stages, plan.microbatches)
        assert isinstance(known, RelativeSteps), known
        found = known
    seconds = plan.prediction.expected_seconds
    return ModeCandidate(
        mode=ASYNC if plan.schedule == ASYNC else "sync",
        weights=plan.weights,
        stages=stages,
        microbatches=plan.microbatches,
        step_seconds=seconds,
        relative_steps=found.value,
        interval=found.interval,
        source=found.source if plan.schedule == ASYNC else "",
        delay=found.delay,
        seconds=seconds * found.value,
    )


def describe_choice(
    candidates: Sequence[ModeCandidate], penalty: StalenessPenalty, plan: Plan
) -> str:
    """Return the reason for the first candidate, whose plan is given, as text."""
    first, *others = candidates
    text = f"{_named(first)} reaches a loss of {penalty.target_loss:g} first: {_times(first)}"
    rest = [other for other in others if other.seconds is not None]
    if rest:
        text += f"; next {_named(rest[0])}, {_times(rest[0])}"
        if _may_be_later(first, rest[0]):
            text += "; within the interval of the measurement the order is not certain"
    same = penalty.model == plan.model.name and penalty.parameters == plan.model.parameters
    if not same:
        text += f"; measured with another model, {penalty.model or 'of unknown name'}"
    return text


def describe_later(candidates: Sequence[ModeCandidate]) -> str:
    """Return why the second candidate was rejected, "" without one."""
    first, second = (*candidates, None, None)[:2]
    if first is None or second is None:
        return ""
    assert first.seconds is not None and second.seconds is not None
    return (
        f"to the target loss {units.seconds(second.seconds)} instead of "
        f"{units.seconds(first.seconds)}"
    )


def _may_be_later(first: ModeCandidate, second: ModeCandidate) -> bool:
    """Return whether the intervals of two candidates overlap."""
    ends = []
    for one, side in ((first, 1), (second, 0)):
        assert one.step_seconds is not None and one.relative_steps is not None
        ends.append(one.step_seconds * (one.interval[side] if one.interval else one.relative_steps))
    return ends[0] > ends[1]


def _named(one: ModeCandidate) -> str:
    if one.mode != ASYNC:
        return one.mode
    return f"{one.mode}, {one.weights} with {one.stages} stages"


def _times(one: ModeCandidate) -> str:
    """Return step time x relative steps = time."""
    assert one.step_seconds is not None and one.seconds is not None
    if one.mode != ASYNC:
        return f"{units.seconds(one.step_seconds)} per step"
    return (
        f"{units.seconds(one.step_seconds)} per step x {one.relative_steps:.3g} relative steps = "
        f"{units.seconds(one.seconds)}"
    )
