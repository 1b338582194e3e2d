"""Whether a finished plan keeps the constraints that it was requested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fxpart.errors import FxpartError, Problem
from fxpart.plan.constraint_table import CONSTRAINTS, DEGREES, QUEUE
from fxpart.plan.model import Plan
from fxpart.planner.execution_mode import ASYNC, mode_of
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.block_names import match_blocks
from fxpart.solver.joint.constraints.megatron_layout import compute_layout_starts
from fxpart.solver.joint.constraints.parse import PlanConstraint, parse_constraints

Constraints = Mapping[str, int | float | str | bool]


def check_plan(
    plan: Plan, constraints: Constraints, blocks: Sequence[str], code: str = "FXP202"
) -> None:
    """Raise an error that names every constraint that the plan does not keep.

    blocks: the names of the model's blocks. code: FXP202 for a plan that was searched for, FXP305
    for one that was given. Raises FXP109 for names that no block has.
    """
    problems = [
        Problem(code, f"constraint {where}", f"the plan has {found}", _fix(code))
        for where, found in _unmet(plan, constraints, blocks)
    ]
    if problems:
        raise FxpartError(problems)


def _fix(code: str) -> str:
    if code == "FXP305":
        return "leave the constraint out to run the plan as it is, or plan again"
    return "this combination of constraints and mode cannot be honored: leave one of them out"


def _unmet(
    plan: Plan, constraints: Constraints, blocks: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Each constraint that is not kept, and what the plan has instead."""
    facts = _facts(plan)
    for wish in parse_constraints(constraints):
        if wish.kind == "stage":
            found = _unpinned(plan, wish, blocks)
        elif wish.kind == "layout":
            found = _other_layout(plan, wish, blocks)
        elif wish.key == "cut":
            found = _forbidden_cut(plan, wish, blocks)
        elif wish.key in _ONE_STAGE_IS_ENOUGH and _is_one_process(plan, wish):
            found = ""
        elif wish.key == "schedule" and plan.schedule == ASYNC and mode_of(constraints) == "auto":
            found = ""  # the schedules are those of the synchronous plan
        else:
            found = _other_value(facts[wish.key], wish)
        if found:
            yield f"{wish}", found
    for key, read in _FIELDS.items():
        if key in constraints and (found := read(plan, constraints)):
            yield f"{key}={constraints[key]!r}", found


def _facts(plan: Plan) -> dict[str, set[str]]:
    """The plan's value of each decision, as text; several where its stages differ."""
    return {
        "pp": {str(len(plan.firsts))},
        **_degrees(plan),
        "zero": {str(stage.zero) for stage in plan.stages},
        "recompute": {stage.recompute for stage in plan.stages},
        "microbatches": {str(plan.microbatches)},
        "schedule": {plan.schedule},
        "virtual": {str(plan.virtual)},
    }


def _degrees(plan: Plan) -> dict[str, set[str]]:
    """The degrees of the mesh by axis, or where none is worked out those of the stages."""
    if plan.sharding is not None:
        axes = dict(Mesh.parse(plan.sharding.mesh).axes)
        return {axis: {str(axes.get(axis, 1))} for axis in DEGREES}
    return {
        "dp": {str(stage.data_parallel) for stage in plan.stages},
        "tp": {str(stage.tensor_parallel) for stage in plan.stages},
        "ep": {str(stage.expert_parallel) for stage in plan.stages},
    }


# With one stage no update is missed, and over one data-parallel rank ZeRO has nothing to divide.
_ONE_STAGE_IS_ENOUGH = ("schedule", "zero")


def _is_one_process(plan: Plan, wish: PlanConstraint) -> bool:
    """Whether the decision makes no difference, as there is nothing to divide."""
    if wish.kind == "forbid":
        return False
    if wish.key == "schedule":
        return ASYNC in wish.values and len(plan.stages) == 1
    return plan.sharding is None or max(stage.data_parallel for stage in plan.stages) == 1


def _other_value(found: set[str], wish: PlanConstraint) -> str:
    """The value that is not among those fixed, or that is forbidden; "" where there is none."""
    if wish.kind == "fix":
        wrong = found - set(wish.values)
    elif wish.values:
        wrong = found & set(wish.values)
    else:
        wrong = found - {CONSTRAINTS[wish.key].plain}
    return "" if not wrong else f"{wish.key}={', '.join(sorted(wrong))}"


def _stage_of(plan: Plan) -> dict[int, int]:
    """The stage of each block, copies of a stage counted once."""
    number = {stage: at for at, stage in enumerate(plan.firsts)}
    return {
        _block(plan, place): number[stage]
        for first, last, stage in plan.program_stages
        if stage in number
        for place in range(first, last + 1)
    }


def _block(plan: Plan, place: int) -> int:
    return plan.order[place] if plan.order else place


def _unpinned(plan: Plan, wish: PlanConstraint, blocks: Sequence[str]) -> str:
    stages, count = _stage_of(plan), len(plan.firsts)
    (wanted,) = wish.numbers
    wanted += count if wanted < 0 else 0
    wrong = [b for b in match_blocks(blocks, wish.key) if stages[b] != wanted]
    return "" if not wrong else f"{blocks[wrong[0]]} on stage {stages[wrong[0]]} of {count}"


def _forbidden_cut(plan: Plan, wish: PlanConstraint, blocks: Sequence[str]) -> str:
    pieces = {
        _block(plan, place): piece
        for piece, (first, last, _) in enumerate(plan.program_stages)
        for place in range(first, last + 1)
    }
    wrong = [
        b
        for b in match_blocks(blocks, wish.values[0])
        if b + 1 < len(blocks) and pieces[b] != pieces[b + 1]
    ]
    return "" if not wrong else f"a cut after {blocks[wrong[0]]}"


def _other_layout(plan: Plan, wish: PlanConstraint, blocks: Sequence[str]) -> str:
    wanted = compute_layout_starts(wish.values[0], blocks)
    firsts = set(plan.firsts)
    found = tuple(first for first, _, stage in plan.program_stages if stage in firsts)
    if found == wanted and not plan.order:
        return ""
    return f"stages that begin with {', '.join(blocks[_block(plan, b)] for b in found)}"


def _ranks(plan: Plan, constraints: Constraints) -> str:
    return "" if plan.world == constraints["ranks"] else f"{plan.world} ranks"


def _copies(plan: Plan, constraints: Constraints) -> str:
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
    wanted = {} if text == "none" else dict(Mesh.parse(text).axes)
    if plan.sharding is not None:
        found = dict(Mesh.parse(plan.sharding.mesh).axes)
        same = all(wanted.get(a, 1) == found.get(a, 1) for a in {*wanted, *found})
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


# Constraints that are a field of the plan: what the plan has instead, "" where it keeps them.
_FIELDS: dict[str, Callable[[Plan, Constraints], str]] = {
    "ranks": _ranks,
    "copies": _copies,
    "mode": _mode,
    "weights": _weights,
    "mesh": _mesh,
    "granularity": _granularity,
    "precision": _precision,
}
