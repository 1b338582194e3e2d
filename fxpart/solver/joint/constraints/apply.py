"""Wishes as limits of a joint problem: options left out, cuts set, blocks pinned to stages."""

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
from fxpart.solver.joint.schedule_costs import has_pieces

_DEGREES = ("dp", "tp", "ep", "zero", "recompute")  # in the order of objective.degrees


def apply_constraints(problem: JointProblem, wishes: Iterable[PlanConstraint]) -> JointProblem:
    """The problem with these wishes kept. Blocks, kinds and works stay.

    Raises FXP109 for names that no block has, and FXP202 where a wish leaves nothing to choose.
    """
    for wish in wishes:
        if wish.kind == "layout":
            problem = _layout(problem, wish)
        elif wish.kind == "stage":
            problem = _stage(problem, wish)
        elif wish.key == "cut":
            problem = _no_cut(problem, wish)
        else:
            problem = _decision(problem, wish)
    return problem


def _decision(problem: JointProblem, wish: PlanConstraint) -> JointProblem:
    """A degree, count or word fixed to some values, or some of its values forbidden."""
    values = wish.values or tuple(
        v for v in _values(problem, wish.key) if v != CONSTRAINTS[wish.key].plain
    )
    fixed = wish.kind == "fix"

    def keeps(value: object) -> bool:
        return (str(value) in values) == fixed

    if wish.key in _DEGREES:
        place = _DEGREES.index(wish.key)
        kept = [
            option
            for index, option in enumerate(problem.options)
            if keeps(degrees(problem, index)[place])
        ]
        if not kept:
            raise _nothing(problem, wish)
        return with_options(problem, kept)
    if wish.key == "pp":
        return _stages(problem, wish, keeps)
    if wish.key == "microbatches":
        known = tuple(m for m in problem.microbatches if keeps(m))
        if not known:
            raise _nothing(problem, wish)
        return msgspec.structs.replace(problem, microbatches=known)
    if wish.key == "virtual":
        pieces = tuple(v for v in problem.virtual if keeps(v)) if not fixed else wish.numbers
        return msgspec.structs.replace(problem, virtual=pieces)
    if fixed:
        return msgspec.structs.replace(problem, schedules=tuple(dict.fromkeys(wish.values)))
    schedules = tuple(s for s in problem.schedules if keeps(s))
    if not schedules:
        raise _nothing(problem, wish)
    return msgspec.structs.replace(problem, schedules=schedules)


def _stages(
    problem: JointProblem, wish: PlanConstraint, keeps: Callable[[object], bool]
) -> JointProblem:
    """Bounds on the number of stages; one in the middle of the range cannot be forbidden."""
    allowed = [s for s in range(problem.min_stages, problem.max_stages + 1) if keeps(s)]
    if not allowed:
        raise _nothing(problem, wish)
    if allowed[-1] - allowed[0] + 1 != len(allowed):
        raise error(
            "FXP109",
            where=str(wish),
            why=f"the stages that are left ({allowed[0]} to {allowed[-1]}) have gaps",
            fix="give one number of stages, or neighbouring ones",
        )
    return msgspec.structs.replace(problem, min_stages=allowed[0], max_stages=allowed[-1])


def with_options(problem: JointProblem, kept: Sequence[ParallelOption]) -> JointProblem:
    """The problem with these options alone, and without works and layouts nobody needs."""
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


def _stage(problem: JointProblem, wish: PlanConstraint) -> JointProblem:
    found = match_blocks(problem.blocks, wish.key)
    runs = [b for b in found if b - 1 not in found], [b for b in found if b + 1 not in found]
    pins = [StagePin(first=a, last=b, stage=wish.numbers[0]) for a, b in zip(*runs, strict=True)]
    return msgspec.structs.replace(problem, pins=(*problem.pins, *pins))


def _no_cut(problem: JointProblem, wish: PlanConstraint) -> JointProblem:
    """No stage ends inside the blocks that the pattern names, nor right after the last of them."""
    last = len(problem.blocks) - 1
    found = {b for b in match_blocks(problem.blocks, wish.values[0]) if b < last}
    cuts = tuple(sorted({*problem.no_cut_after, *found}))
    return msgspec.structs.replace(problem, no_cut_after=cuts)


def _layout(problem: JointProblem, wish: PlanConstraint) -> JointProblem:
    starts = compute_layout_starts(wish.values[0], problem.blocks)
    ends = {start - 1 for start in starts[1:]}
    others = set(range(len(problem.blocks) - 1)) - ends
    if wrong := sorted(ends & set(problem.no_cut_after)):
        raise error(
            "FXP202",
            where=str(wish),
            why=f"a stage would end after {problem.blocks[wrong[0]]}, where the model has no cut",
            fix="move this boundary",
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
    """The values that the problem has to choose from, as words."""
    if key in _DEGREES:
        place = _DEGREES.index(key)
        found = {degrees(problem, index)[place] for index in range(len(problem.options))}
        return tuple(map(str, sorted(found, key=lambda v: (str(type(v)), v))))
    if key == "pp":
        return tuple(map(str, range(problem.min_stages, problem.max_stages + 1)))
    rows = {"microbatches": problem.microbatches, "virtual": problem.virtual}
    return tuple(map(str, rows.get(key, problem.schedules)))


def _nothing(problem: JointProblem, wish: PlanConstraint) -> FxpartError:
    have = _values(problem, wish.key)
    shown = f"{have[0]} to {have[-1]}" if wish.key == "pp" and have else ", ".join(have)
    return error(
        "FXP202",
        where=str(wish),
        why="nothing is left to choose from",
        fix=f"here {wish.key} can be {shown or 'nothing, given the other wishes'}",
    )
