"""Check a plan and report every fault, not only the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.errors import Problem, short
from fxpart.plan.check_prediction import prediction
from fxpart.plan.check_sharding import sharding
from fxpart.plan.check_stages import Faults, edges, mesh, order, ranks, stages, ties
from fxpart.plan.number_ranges import shorten
from fxpart.schedule.spec import SCHEDULES, list_schedules
from fxpart.schedule.weight_modes import MODES, list_queue_modes

if TYPE_CHECKING:
    from fxpart.plan.model import Certificate, Plan

MAX_PROBLEMS = 200
_LARGEST = 1 << 63
_HUGE = 1 << 1000  # computing with larger numbers overflows floats
_TOO_LARGE = "the number is too large"
_NO_FLOAT = "the number is too large for any computation"
_FIX = "plan again with `fxpart plan`, or correct this field"


def problems(plan: Plan) -> tuple[Problem, ...]:
    """Return every FXP303 of the plan, at most MAX_PROBLEMS.

    Unknown schedules and weight modes, and numbers that are too large for floats, are returned
    alone: the other checks depend on them.
    """
    found: list[Problem] = []
    found += (Problem("FXP303", where, why, _FIX) for where, why in _names(plan))
    if found:
        return tuple(found)  # the other checks look up their table entries
    for check in _CHECKS:
        for where, why in check(plan):
            found.append(Problem("FXP303", where, why, _FIX))
            if len(found) >= MAX_PROBLEMS:
                return tuple(found)
        if any(problem.why == _NO_FLOAT for problem in found):
            return tuple(found)  # the other checks compute with floats
    certificates = {"certificate": plan.certificate}
    if plan.degrees is not None:
        certificates["degrees"] = plan.degrees
    if plan.sharding is not None and plan.sharding.certificate is not None:
        certificates["sharding.certificate"] = plan.sharding.certificate
    for where, given in certificates.items():
        found += [Problem("FXP303", w, y, _FIX) for w, y in _certificate(given, where)]
    return tuple(found)


def _names(plan: Plan) -> Faults:
    """Check that the schedule and the weight mode are known."""
    spec = SCHEDULES.get(plan.schedule)
    if spec is None or not spec.trains:
        known = ", ".join(list_schedules(trains=True))
        yield "schedule", f"Unknown schedule {short(plan.schedule)!a}. Known schedules: {known}."
    if plan.weights not in MODES:
        known = ", ".join(MODES)
        yield "weights", f"Unknown weight mode {short(plan.weights)!a}. Known modes: {known}."


def _numbers(plan: Plan) -> Faults:
    """Check that numbers are finite, not too large, and not negative except the seed."""
    signed = {"seed", "constraints"}
    # The cluster has its own checks; ranks are checked individually with their stages.
    mine = {name: getattr(plan, name) for name in plan.__struct_fields__ if name != "cluster"}
    for name, value in shorten(msgspec.to_builtins(mine)).items():
        for path, number in _leaves(value, name):
            if isinstance(number, float) and not math.isfinite(number):
                yield path, f"{number} is not a finite number"
            elif abs(number) >= _LARGEST and isinstance(number, int):
                yield path, _NO_FLOAT if abs(number) >= _HUGE else _TOO_LARGE
            elif number < 0 and name not in signed:
                yield path, f"{number} is negative"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{ascii(key)[1:-1]}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _cluster(plan: Plan) -> Faults:
    faults = plan.cluster.problems()
    for problem in faults:
        yield f"cluster, {problem.where}", problem.why
    if not faults and plan.cluster_hash != plan.cluster.hash:
        yield "cluster_hash", "this is not the hash of the cluster in the plan"


def _model(plan: Plan) -> Faults:
    model = plan.model
    if model.blocks < 1:
        yield "model.blocks", "there are no blocks"
    if model.nodes < model.blocks:
        yield "model.nodes", f"{model.nodes} nodes cannot form {model.blocks} blocks"
    for name, count in Counter(i.name for i in model.inputs).items():
        if count > 1:
            yield "model.inputs", f"the name {short(name)!a} occurs {count} times"
    for index, item in enumerate(model.inputs):
        if item.batch_dim is not None and item.batch_dim >= len(item.shape):
            yield f"model.inputs[{index}].batch_dim", f"the shape has {len(item.shape)} dims"


def _counts(plan: Plan) -> Faults:
    if plan.batch_size < 1:
        yield "batch_size", "the batch size is below 1"
    if not 1 <= plan.microbatches <= max(plan.batch_size, 1):
        yield "microbatches", f"{plan.batch_size} samples cannot be split into {plan.microbatches}"
    for field, others in (("alternatives", plan.alternatives), ("changes", plan.changes)):
        for index, other in enumerate(others):
            if min(other.stages, other.microbatches) < 1:
                yield (
                    f"{field}[{index}]",
                    "the numbers of stages and microbatches must be at least 1",
                )
            if other.step_seconds is not None and other.unfit_seconds is not None:
                yield f"{field}[{index}]", "step_seconds and unfit_seconds exclude each other"


def _certificate(given: Certificate, where: str) -> Faults:
    objective, bound = given.objective, given.lower_bound
    if not all(math.isfinite(x) for x in (objective, bound, given.gap)):
        return  # reported by _numbers
    if bound > objective * (1 + 1e-9):
        yield f"{where}.lower_bound", f"{bound} is above the objective {objective}"
    gap = (objective - bound) / objective if objective > 0 else 0.0
    if abs(given.gap - max(gap, 0.0)) > 1e-6:
        yield f"{where}.gap", f"the gap is {given.gap}, but objective and bound yield {gap:.6g}"
    if given.status == "optimal" and gap > 1e-6:
        yield f"{where}.status", f"the status is optimal, but the gap is {gap:.6g}"


def queues(plan: Plan) -> Faults:
    """Check that each stage has a staleness, equal for its replicas, and one rank."""
    if not plan.staleness:
        return
    if len(plan.staleness) != len(plan.stages):
        yield "staleness", f"{len(plan.staleness)} numbers for {len(plan.stages)} stages"
        return
    for group in plan.replicas:
        known = {plan.staleness[copy] for copy in group if copy < len(plan.staleness)}
        if len(known) > 1:
            yield "staleness", f"replicas of stage {group[0]} differ: {sorted(known)}"
    if not SCHEDULES[plan.schedule].supports_queues:
        yield "staleness", f"the schedule {plan.schedule} does not support queues"
    if any(len(stage.ranks) != 1 for stage in plan.stages):
        yield "staleness", "queues require stages of one rank, but some have several"
    for index, row in enumerate(plan.prediction.ranks):
        if row.staleness > max(plan.staleness[row.stage : row.stage + 1], default=0):
            where = f"prediction.ranks[{index}].staleness"
            yield where, f"{row.staleness} updates are more than stage {row.stage} may miss"


def weights(plan: Plan) -> Faults:
    """Check that the weight mode matches the schedule and the staleness."""
    if any(plan.staleness):
        if not MODES[plan.weights].supports_queues:
            yield (
                "weights",
                f"{plan.weights} does not support queues; use {', '.join(list_queue_modes())}",
            )
    elif MODES[plan.weights].flush != SCHEDULES[plan.schedule].flushes:
        yield "weights", f"{plan.weights} does not match the schedule {plan.schedule}"


_CHECKS = (
    _numbers, _cluster, _model, stages, ranks, order, mesh, edges, ties, _counts, queues, weights,
    prediction, sharding,
)  # fmt: skip
