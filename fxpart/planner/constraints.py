"""The constraints of compile(): which there are, what each may be, and what a mesh rules out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpart.errors import Problem, error
from fxpart.plan.constraint_table import (
    CONSTRAINTS,
    DATA_AXIS,
    DEGREES,
    QUEUE,
    ConstraintSpec,
    suggest_names,
)
from fxpart.plan.model import Plan
from fxpart.planner.execution_mode import (
    ASYNC,
    Constraints,
    as_synchronous,
    mode_of,
)
from fxpart.planner.execution_mode import find_mode_problems as mode_faults
from fxpart.schedule.spec import DEFAULT_SCHEDULE, find_built, list_schedules
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.parse import find_constraint_problems as wish_faults
from fxpart.solver.joint.constraints.parse import parse_constraints


def find_constraint_problems(constraints: Constraints) -> list[Problem]:
    """Return one problem for each constraint that is unknown or has a value of another kind."""
    problems = []
    for key, value in constraints.items():
        where = f"constraint {key}={str(value)[:80]!r}"
        spec = CONSTRAINTS.get(key)
        if spec is None:
            fix = suggest_names(key, tuple(CONSTRAINTS))
            problems.append(Problem("FXP109", where, "it is not a constraint", fix))
            continue
        found = _find_wrong_value(spec, value)
        if found is not None:
            problems.append(Problem("FXP109", where, *found))
    if not problems:
        problems += [*wish_faults(constraints), *mode_faults(constraints)]
    if not problems:
        problems += [*_virtual_faults(constraints), *_solver_faults(constraints)]
    needing: tuple[str, ...] = ()
    if constraints.get("mesh") in (None, "", "none"):
        needing = tuple(name for name, spec in CONSTRAINTS.items() if spec.needs == "mesh")
    if constraints.get("mesh") == "auto" and constraints.get("zero_axis", DATA_AXIS) != DATA_AXIS:
        needing = ("zero_axis",)  # of a mesh that is searched for it is the data-parallel axis
    fix = 'add the constraint "mesh", such as "dp=2,tp=2"'
    problems += [
        Problem("FXP109", f"constraint {key}={wish!r}", "it says nothing without a mesh", fix)
        for key in needing
        if (wish := constraints.get(key))
    ]
    return problems


def _find_wrong_value(spec: ConstraintSpec, value: object) -> tuple[str, str] | None:
    """Return what is wrong with a value of a constraint, and the fix; None where it is right."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    choices = " or ".join(map(str, spec.list_choices()))
    if spec.name == "precision" and value in ("fp16", "float16", "half"):
        return "float16 needs its loss scaled, which is not done", "bf16"
    if spec.kind == "choice" and not spec.accepts(value):
        return "it is not a choice", choices
    if spec.kind == "numbers" and spec.choices and not (number and spec.accepts(value)):
        return "it is not a choice", choices
    if spec.kind in ("text", "entries") and not spec.same_as and not isinstance(value, str):
        return "it is not a text", ""
    if spec.kind == "count" and not (number and isinstance(value, int) and value >= spec.least):
        return "it is not a whole number above 0", ""
    if spec.kind == "seconds" and not (number and float(str(value)) > 0):
        return "it is not a number of seconds above 0", ""
    return None


def _virtual_faults(constraints: Constraints) -> Iterator[Problem]:
    """FXP109 where virtual stages are requested from schedules that have one stage per rank."""
    wanted = [w for w in parse_constraints(constraints) if (w.kind, w.key) == ("fix", "virtual")]
    if not wanted or any("1" in wish.values for wish in wanted):
        return
    mode = mode_of(constraints)
    words = str(as_synchronous(constraints).get("schedule", DEFAULT_SCHEDULE)).split(",")
    if mode in ("sync", "auto") and any(_is_virtual(word.strip()) for word in words):
        return
    schedules = " or ".join(f"schedule={name}" for name in list_schedules(is_virtual=True))
    yield Problem(
        "FXP109",
        f"constraint virtual={constraints['virtual']!r}",
        f"mode={mode} has one stage per rank"
        if mode in (ASYNC, QUEUE)
        else f"schedule={','.join(words)} has one stage per rank",
        f"mode=sync with {schedules}",
    )


def _is_virtual(name: str) -> bool:
    spec = find_built(name)
    return spec is not None and spec.is_virtual


def _solver_faults(constraints: Constraints) -> Iterator[Problem]:
    """FXP109 for a solver that the cuts of an asynchronous pipeline are not solved by."""
    solver = constraints.get("solver", "auto")
    if mode_of(constraints) == ASYNC and solver not in ("auto", "dp"):
        yield Problem(
            "FXP109",
            f"constraint solver={solver!r}",
            "the cuts of an asynchronous pipeline are solved by dynamic programming",
            "solver=dp, or mode=sync",
        )


def find_mesh_conflicts(constraints: Constraints, mesh: Mesh) -> list[Problem]:
    """One problem for each decision that is fixed beside a mesh and is not the mesh's."""
    said = {"recompute": CONSTRAINTS["recompute"].plain}
    said |= {axis: str(dict(mesh.axes).get(axis, 1)) for axis in DEGREES}
    given = f"the mesh {constraints['mesh']}" if "mesh" in constraints else f"the mode {QUEUE}"
    return [
        Problem(
            "FXP109",
            f"constraint {wish.key}={','.join(wish.values)}",
            f"with {given} each stage has {wish.key}={said[wish.key]}",
            f"leave {wish.key} out, or {given}"
            if wish.key in DEGREES
            else 'trainer(recompute="full") makes a plan recompute',
        )
        for wish in parse_constraints(constraints)
        if wish.kind == "fix" and wish.key in said and said[wish.key] not in wish.values
    ]


def constrains_cuts(constraints: Constraints) -> bool:
    """Whether a constraint says where stages begin, or where they must not."""
    return any(
        w.kind in ("stage", "layout") or w.key == "cut" for w in parse_constraints(constraints)
    )


def allowed_stages(constraints: Constraints, most: int) -> tuple[int, ...]:
    """Return the numbers of stages up to ``most`` that the constraints allow."""
    allowed: Sequence[int] = range(1, most + 1)
    for wish in parse_constraints(constraints):
        if wish.key == "pp" and wish.kind == "fix":
            allowed = [n for n in allowed if n in wish.numbers]
        elif wish.key == "pp":
            forbidden = wish.numbers or range(2, most + 1)
            allowed = [n for n in allowed if n not in forbidden]
    return tuple(allowed)


def with_numbers(
    constraints: Constraints | None,
    precision: str | None,
    transfer_dtype: str | None,
    plan: Plan | None = None,
) -> dict[str, int | float | str | bool]:
    """The constraints with the arguments ``precision`` and ``transfer_dtype`` among them.

    plan: where one is applied: it says both, and FXP305 where an argument says something else.
    """
    found = dict(constraints or {})
    for name, given in (("precision", precision), ("transfer_dtype", transfer_dtype)):
        if given is not None:
            found[name] = given
        if plan is None:
            continue
        wished, planned = found.get(name), getattr(plan, name)
        if wished is not None and wished != planned:
            raise error(
                "FXP305",
                where=f"{name}={wished!r}",
                why=f"the plan for {plan.model.name} was made with {name}={planned!r}",
                fix="leave it out to run the plan as it is, or plan again",
            )
        if planned not in ("fp32", ""):
            found[name] = planned
    return found


def with_coupling(
    constraints: dict[str, int | float | str | bool], batch_coupling: str | None
) -> dict[str, int | float | str | bool]:
    """The constraints with the argument ``batch_coupling`` among them."""
    if batch_coupling is None:
        return constraints
    return {**constraints, "batch_coupling": batch_coupling}


def match_capture_precision(
    constraints: dict[str, int | float | str | bool], precision: str
) -> dict[str, int | float | str | bool]:
    """Constraints for a graph captured in this precision; FXP109 where they ask for another."""
    if constraints.get("precision", precision) != precision:
        raise error(
            "FXP109",
            where=f"precision={constraints['precision']!r}",
            why=f"the model was captured in {precision}",
            fix="compile the model again",
        )
    return constraints if precision == "fp32" else {**constraints, "precision": precision}


def check_trainable(constraints: Constraints) -> None:
    """The schedules asked for can be run; FXP109 naming those that cannot."""
    wanted = str(as_synchronous(constraints).get("schedule", DEFAULT_SCHEDULE)).split(",")
    trained = (DEFAULT_SCHEDULE, *list_schedules(trains=True, flushes=True))
    wrong = [name.strip() for name in wanted if name.strip() not in trained]
    if wrong:
        raise error(
            "FXP109",
            where=f"schedule={constraints['schedule']}",
            why=f"{wrong[0]} can be planned (fxpart plan --space all), but not trained yet",
            fix=" or ".join(dict.fromkeys(trained)),
        )
