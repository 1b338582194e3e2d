"""Check that a finished plan satisfies the constraints that it was requested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fxpart.errors import FxpartError, Problem
from fxpart.plan.constraint_table import CONSTRAINTS, DEGREES, QUEUE, SHARD_AXIS
from fxpart.plan.model import Plan
from fxpart.plan.offload import AUTO
from fxpart.planner.constraints import merge_data_axes
from fxpart.planner.execution_mode import ASYNC, mode_of
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.block_names import match_blocks
from fxpart.solver.joint.constraints.megatron_layout import compute_layout_starts
from fxpart.solver.joint.constraints.parse import PlanConstraint, parse_constraints

Constraints = Mapping[str, int | float | str | bool]


def check_plan(
    plan: Plan, constraints: Constraints, blocks: Sequence[str], code: str = "FXP202"
) -> None:
    """Raise an error that names every constraint that the plan violates.

    blocks: names of the model's blocks. code: FXP202 for a plan that was just searched for, FXP305
    for a plan that the user supplied. Raises FXP109 for names that match no block.
    """
    problems = [
        Problem(code, f"constraint {where}", f"the plan has {found} instead", _fix(code))
        for where, found in _find_violations(plan, constraints, blocks)
    ]
    if problems:
        raise FxpartError(problems)


def _fix(code: str) -> str:
    if code == "FXP305":
        return "remove the constraint to run the plan unchanged, or plan again"
    return "this combination of constraints and mode cannot be satisfied: remove one of them"


def _find_violations(
    plan: Plan, constraints: Constraints, blocks: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each violated constraint and what the plan has instead."""
    facts = _list_values(plan)
    for constraint in parse_constraints(constraints):
        if constraint.kind == "stage":
            found = _find_wrong_stage(plan, constraint, blocks)
        elif constraint.kind == "layout":
            found = _find_wrong_layout(plan, constraint, blocks)
        elif constraint.key == "cut":
            found = _find_forbidden_cut(plan, constraint, blocks)
        elif constraint.by_stage:
            degrees = [str(stage.tensor_parallel) for stage in plan.stages]
            found = "" if degrees == [*constraint.values] else f"tp={'|'.join(degrees)}"
        elif constraint.key in _WITHOUT_EFFECT_ON_ONE_RANK and _has_no_effect(plan, constraint):
            found = ""
        elif (
            constraint.key == "schedule"
            and plan.schedule == ASYNC
            and mode_of(constraints) == "auto"
        ):
            found = ""  # the constraint lists schedules for the synchronous plan
        else:
            found = _find_wrong_value(facts[constraint.key], constraint)
        if found:
            yield f"{constraint}", found
    for key, read in _FIELDS.items():
        if key in constraints and (found := read(plan, constraints)):
            yield f"{key}={constraints[key]!r}", found


def _list_values(plan: Plan) -> dict[str, set[str]]:
    """Return the plan's values of each decision as text; several where its stages differ."""
    return {
        "pp": {str(len(plan.firsts))},
        "zero": {str(stage.zero) for stage in plan.stages},
        "shard_degree": {str(stage.shard_degree) for stage in plan.stages},
        **_degrees(plan),
        "recompute": {stage.recompute for stage in plan.stages},
        "microbatches": {str(plan.microbatches)},
        "schedule": {plan.schedule},
        "virtual": {str(plan.virtual)},
    }


def _degrees(plan: Plan) -> dict[str, set[str]]:
    """Return the degrees by mesh axis, or those of the stages where no mesh is known."""
    if plan.sharding is not None:
        mesh = Mesh.parse(plan.sharding.mesh)
        axes = merge_data_axes(mesh)
        expert = {str(stage.expert_parallel) for stage in plan.stages}  # over dp
        named = {axis: {str(axes.get(axis, 1))} for axis in DEGREES}
        if len({len(stage.ranks) for stage in plan.stages}) > 1:
            named["tp"] = {str(stage.tensor_parallel) for stage in plan.stages}
        if plan.sharding.zero and plan.sharding.zero_axis == SHARD_AXIS:
            named["shard_degree"] = {str(mesh.count(SHARD_AXIS))}
        return named if "ep" in axes else {**named, "ep": expert}
    return {
        "dp": {str(stage.data_parallel) for stage in plan.stages},
        "tp": {str(stage.tensor_parallel) for stage in plan.stages},
        "ep": {str(stage.expert_parallel) for stage in plan.stages},
        "cp": {str(stage.context_parallel) for stage in plan.stages},
    }


# With one stage no update is missed; with one data-parallel rank ZeRO has nothing to shard.
_WITHOUT_EFFECT_ON_ONE_RANK = ("schedule", "zero")


def _has_no_effect(plan: Plan, constraint: PlanConstraint) -> bool:
    """Return whether the decision has no effect because there is nothing to divide."""
    if constraint.kind == "forbid":
        return False
    if constraint.key == "schedule":
        return ASYNC in constraint.values and len(plan.stages) == 1
    return plan.sharding is None or max(stage.data_parallel for stage in plan.stages) == 1


def _find_wrong_value(found: set[str], constraint: PlanConstraint) -> str:
    """Return the value that violates the constraint, "" where none does."""
    if constraint.kind == "fix":
        wrong = found - set(constraint.values)
    elif constraint.values:
        wrong = found & set(constraint.values)
    else:
        wrong = found - {CONSTRAINTS[constraint.key].plain}
    return "" if not wrong else f"{constraint.key}={', '.join(sorted(wrong))}"


def _stage_of(plan: Plan) -> dict[int, int]:
    """Return the stage number of each block; replicas of a stage are counted once."""
    number = {stage: at for at, stage in enumerate(plan.firsts)}
    return {
        _block(plan, place): number[stage]
        for first, last, stage in plan.program_stages
        if stage in number
        for place in range(first, last + 1)
    }


def _block(plan: Plan, place: int) -> int:
    return plan.order[place] if plan.order else place


def _find_wrong_stage(plan: Plan, constraint: PlanConstraint, blocks: Sequence[str]) -> str:
    stages, count = _stage_of(plan), len(plan.firsts)
    (wanted,) = constraint.numbers
    wanted += count if wanted < 0 else 0
    wrong = [b for b in match_blocks(blocks, constraint.key) if stages[b] != wanted]
    return "" if not wrong else f"{blocks[wrong[0]]} on stage {stages[wrong[0]]} of {count}"


def _find_forbidden_cut(plan: Plan, constraint: PlanConstraint, blocks: Sequence[str]) -> str:
    pieces = {
        _block(plan, place): piece
        for piece, (first, last, _) in enumerate(plan.program_stages)
        for place in range(first, last + 1)
    }
    wrong = [
        b
        for b in match_blocks(blocks, constraint.values[0])
        if b + 1 < len(blocks) and pieces[b] != pieces[b + 1]
    ]
    return "" if not wrong else f"a cut after {blocks[wrong[0]]}"


def _find_wrong_layout(plan: Plan, constraint: PlanConstraint, blocks: Sequence[str]) -> str:
    wanted = compute_layout_starts(constraint.values[0], blocks)
    firsts = set(plan.firsts)
    found = tuple(first for first, _, stage in plan.program_stages if stage in firsts)
    if found == wanted and not plan.order:
        return ""
    return f"stages that begin with {', '.join(blocks[_block(plan, b)] for b in found)}"


def _ranks(plan: Plan, constraints: Constraints) -> str:
    return "" if plan.world == constraints["ranks"] else f"{plan.world} ranks"


def _replication(plan: Plan, constraints: Constraints) -> str:
    return "replicated stages" if constraints["copies"] == "none" and plan.replicas else ""


def _mode(plan: Plan, constraints: Constraints) -> str:
    mode = mode_of(constraints)
    found = ASYNC if plan.schedule == ASYNC else QUEUE if plan.staleness else "sync"
    if mode in (found, "auto") or (mode == ASYNC and len(plan.stages) == 1):
        return ""
    return f"mode={found}"


def _weights(plan: Plan, constraints: Constraints) -> str:
    stale = plan.schedule == ASYNC or any(plan.staleness)
    return f"weights={plan.weights}" if stale and plan.weights != constraints["weights"] else ""


def _mesh(plan: Plan, constraints: Constraints) -> str:
    text = str(constraints["mesh"])
    if text in ("", "auto"):
        return ""
    mesh = Mesh() if text == "none" else Mesh.parse(text)
    wanted = merge_data_axes(mesh)
    if plan.sharding is not None:
        given = Mesh.parse(plan.sharding.mesh)
        found = merge_data_axes(given)  # the constraint shard_degree splits the data axis
        same = all(wanted.get(a, 1) == found.get(a, 1) for a in {*wanted, *found})
        same &= SHARD_AXIS not in mesh.names or mesh.count(SHARD_AXIS) == given.count(SHARD_AXIS)
        return "" if same else f"the mesh {plan.sharding.mesh}"
    degrees = _degrees(plan)
    wrong = [a for a in degrees if degrees[a] != {str(wanted.pop(a, 1))}]
    missing = [a for a, size in wanted.items() if size > 1]
    return " ".join(f"{a}={','.join(sorted(degrees.get(a, {'1'})))}" for a in (*wrong, *missing))


def _granularity(plan: Plan, constraints: Constraints) -> str:
    found = plan.constraints.get("granularity", "block")
    return "" if found == constraints["granularity"] else f"blocks of granularity={found}"


def _precision(plan: Plan, constraints: Constraints) -> str:
    return "" if plan.precision == constraints["precision"] else f"precision={plan.precision}"


def _offload(plan: Plan, constraints: Constraints) -> str:
    return "" if constraints["offload"] in (plan.offload, AUTO) else f"offload={plan.offload}"


# Constraints that are a field of the plan: what the plan has instead, "" where they hold.
_FIELDS: dict[str, Callable[[Plan, Constraints], str]] = {
    "ranks": _ranks,
    "copies": _replication,
    "mode": _mode,
    "weights": _weights,
    "mesh": _mesh,
    "granularity": _granularity,
    "precision": _precision,
    "offload": _offload,
}
