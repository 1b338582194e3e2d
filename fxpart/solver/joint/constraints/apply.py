"""Constraints applied to a joint problem: options removed, cuts set, blocks pinned to stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.plan.constraint_table import CONSTRAINTS
from fxpart.solver.joint.constraints.block_names import match_blocks
from fxpart.solver.joint.constraints.megatron_layout import compute_layout_starts
from fxpart.solver.joint.constraints.parse import PlanConstraint
from fxpart.solver.joint.objective import degrees
from fxpart.solver.joint.problem import JointProblem, ParallelOption, StagePin
from fxpart.solver.schedule_costs import has_pieces

# In the order of objective.Degrees.
_DEGREES = ("dp", "tp", "ep", "zero", "recompute", "cp", "shard_degree")


def apply_constraints(problem: JointProblem, constraints: Iterable[PlanConstraint]) -> JointProblem:
    """Return the problem restricted by these constraints; blocks, kinds and works are unchanged.

    Raises FXP109 for names that match no block, and FXP202 if a constraint leaves no choice.
    """
    whole, applied = problem, list[PlanConstraint]()
    for constraint in constraints:
        if constraint.kind == "layout":
            problem = _layout(problem, constraint)
        elif constraint.kind == "stage":
            problem = _stage(problem, constraint)
        elif constraint.key == "cut":
            problem = _no_cut(problem, constraint)
        elif (found := _decision(problem, constraint)) is not None:
            problem = found
        else:
            raise _explain_conflict(whole, problem, constraint, applied)
        applied.append(constraint)
    return problem


def _decision(problem: JointProblem, constraint: PlanConstraint) -> JointProblem | None:
    """Restrict a degree, count or name to some values, or exclude values; None if none is left."""
    values = constraint.values or tuple(
        v for v in _values(problem, constraint.key) if v != CONSTRAINTS[constraint.key].plain
    )
    fixed = constraint.kind == "fix"

    def keeps(value: object) -> bool:
        return (str(value) in values) == fixed

    if constraint.key in _DEGREES:
        place = _DEGREES.index(constraint.key)
        kept = [
            option
            for index, option in enumerate(problem.options)
            if keeps(degrees(problem, index)[place])
        ]
        if constraint.by_stage:
            count = len(values)
            fits = problem.min_stages <= count <= problem.max_stages
            problem = msgspec.structs.replace(
                problem, stage_tensor=constraint.numbers, min_stages=count, max_stages=count
            )
            kept = kept if fits else []
        return with_options(problem, kept) if kept else None
    if constraint.key == "pp":
        return _stages(problem, constraint, keeps)
    if constraint.key == "microbatches":
        known = tuple(m for m in problem.microbatches if keeps(m))
        return msgspec.structs.replace(problem, microbatches=known) if known else None
    if constraint.key == "virtual":
        pieces = tuple(v for v in problem.virtual if keeps(v)) if not fixed else constraint.numbers
        return msgspec.structs.replace(problem, virtual=pieces)
    if fixed:
        return msgspec.structs.replace(problem, schedules=tuple(dict.fromkeys(constraint.values)))
    schedules = tuple(s for s in problem.schedules if keeps(s))
    return msgspec.structs.replace(problem, schedules=schedules) if schedules else None


def _stages(
    problem: JointProblem, constraint: PlanConstraint, keeps: Callable[[object], bool]
) -> JointProblem | None:
    """Restrict the number of stages; the allowed numbers must be contiguous."""
    allowed = [s for s in range(problem.min_stages, problem.max_stages + 1) if keeps(s)]
    if not allowed:
        return None
    if allowed[-1] - allowed[0] + 1 != len(allowed):
        raise error(
            "FXP109",
            where=str(constraint),
            why=f"The allowed numbers of stages ({allowed[0]} to {allowed[-1]}) have gaps.",
            fix="Specify one number of stages, or consecutive ones.",
        )
    return msgspec.structs.replace(problem, min_stages=allowed[0], max_stages=allowed[-1])


def with_options(problem: JointProblem, kept: Sequence[ParallelOption]) -> JointProblem:
    """Return the problem with these options only, and without unused works and layouts."""
    needed = {(o.pool, o.layout, o.recompute) for o in kept}
    layouts = sorted({o.layout for o in kept})
    number = {old: new for new, old in enumerate(layouts)}
    return msgspec.structs.replace(
        problem,
        options=tuple(msgspec.structs.replace(o, layout=number[o.layout]) for o in kept),
        layouts=tuple(problem.layouts[i] for i in layouts),
        works=tuple(
            msgspec.structs.replace(w, layout=number[w.layout])
            for w in problem.works
            if (w.pool, w.layout, w.recompute) in needed
        ),
    )


def _stage(problem: JointProblem, constraint: PlanConstraint) -> JointProblem:
    found = match_blocks(problem.blocks, constraint.key)
    runs = [b for b in found if b - 1 not in found], [b for b in found if b + 1 not in found]
    pins = [
        StagePin(first=a, last=b, stage=constraint.numbers[0]) for a, b in zip(*runs, strict=True)
    ]
    return msgspec.structs.replace(problem, pins=(*problem.pins, *pins))


def _no_cut(problem: JointProblem, constraint: PlanConstraint) -> JointProblem:
    """Forbid stage ends inside the named blocks, and directly after the last of them."""
    last = len(problem.blocks) - 1
    found = {b for b in match_blocks(problem.blocks, constraint.values[0]) if b < last}
    cuts = tuple(sorted({*problem.no_cut_after, *found}))
    return msgspec.structs.replace(problem, no_cut_after=cuts)


def _layout(problem: JointProblem, constraint: PlanConstraint) -> JointProblem:
    starts = compute_layout_starts(constraint.values[0], problem.blocks)
    ends = {start - 1 for start in starts[1:]}
    others = set(range(len(problem.blocks) - 1)) - ends
    if wrong := sorted(ends & set(problem.no_cut_after)):
        raise error(
            "FXP202",
            where=str(constraint),
            why=f"A stage would end after {problem.blocks[wrong[0]]}, which is not a cut.",
            fix="Move this boundary.",
        )
    count = len(starts)
    interleaved = any(map(has_pieces, problem.schedules)) and problem.max_stages < count
    return msgspec.structs.replace(
        problem,
        cut_after=tuple(sorted({*problem.cut_after, *ends})),
        no_cut_after=tuple(sorted({*problem.no_cut_after, *others})),
        min_stages=problem.min_stages if interleaved else count,
        max_stages=problem.max_stages if interleaved else count,
    )


def _values(problem: JointProblem, key: str) -> tuple[str, ...]:
    """Return the values that the problem can choose from, as text."""
    if key in _DEGREES:
        place = _DEGREES.index(key)
        found = {degrees(problem, index)[place] for index in range(len(problem.options))}
        return tuple(map(str, sorted(found, key=lambda v: (str(type(v)), v))))
    if key == "pp":
        return tuple(map(str, range(problem.min_stages, problem.max_stages + 1)))
    rows = {"microbatches": problem.microbatches, "virtual": problem.virtual}
    return tuple(map(str, rows.get(key, problem.schedules)))


def _explain_conflict(
    whole: JointProblem,
    problem: JointProblem,
    constraint: PlanConstraint,
    applied: Sequence[PlanConstraint],
) -> FxpartError:
    """Return FXP202 for a constraint that leaves no choice. applied: those before it."""
    have = _values(problem, constraint.key)
    shown = f"{have[0]} to {have[-1]}" if constraint.key == "pp" and have else " or ".join(have)
    before = (
        f"; {', '.join(map(str, applied))} left"
        if applied and have != _values(whole, constraint.key)
        else "; the other constraints, the model and the devices allow"
    )
    return error(
        "FXP202",
        where=str(constraint),
        why=f"no choice is left{before} {constraint.key} {shown or 'no value'}",
        fix=f"use {constraint.key} {shown}, or remove a constraint" if shown else
        "remove a constraint",
    )  # fmt: skip
