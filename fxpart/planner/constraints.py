"""The constraints of compile(): which there are, what each may be, and what a mesh rules out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpart.errors import Problem, error
from fxpart.plan.model import Plan
from fxpart.plan.precision import PRECISIONS, TRANSFER_DTYPES
from fxpart.planner.execution_mode import (
    ASYNC,
    NAMES,
    QUEUE,
    Constraints,
    as_synchronous,
    mode_of,
)
from fxpart.planner.execution_mode import find_mode_problems as mode_faults
from fxpart.schedule.spec import DEFAULT_SCHEDULE, find_built, list_schedules
from fxpart.schedule.weight_modes import MODES
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.parse import NUMBERS, SAME, WORDS, parse_constraints
from fxpart.solver.joint.constraints.parse import find_constraint_problems as wish_faults

# The kind of each constraint, and the words to choose from.
ALLOWED: dict[str, tuple[type, tuple[str, ...]]] = {
    "stages": (int, ()),
    "granularity": (str, ("block", "op")),
    "copies": (str, ("auto", "none", "always")),
    "solver": (str, ("auto", "dp", "cp-sat", "brute")),
    "time_limit": (float, ()),
    "mesh": (str, ()),
    "annotations": (str, ()),
    "placements": (str, ("solver", "annotated")),
    "zero": (int, ()),
    "zero_axis": (str, ()),
    "ranks": (int, ()),
    "forbid": (str, ()),
    "stage": (str, ()),
    "layout": (str, ()),
    "precision": (str, PRECISIONS),
    "transfer_dtype": (str, TRANSFER_DTYPES),
    "mode": (str, NAMES),
    "weights": (str, ()),  # a weight mode: the choices grow when users register one
    "staleness": (object, ()),
    "batch_coupling": (str, ("per-microbatch",)),
}
SHARDING = ("annotations", "placements", "zero_axis")  # they need a mesh
# Decisions that may be fixed to one value or several: "tp": 2 or "2,4".
WISHES = tuple(k for k in (*NUMBERS, *WORDS, *SAME) if k not in ALLOWED)
DEGREES = ("dp", "tp", "ep")  # what a mesh decides, by its axes of these names


def find_constraint_problems(constraints: Constraints) -> list[Problem]:
    """One problem for each constraint that is not known or not of the right kind."""
    problems = []
    for key, value in constraints.items():
        where = f"constraint {key}={str(value)[:80]!r}"
        if key in WISHES:
            continue
        if key not in ALLOWED:
            fix = f"one of {', '.join((*ALLOWED, *WISHES))}"
            problems.append(Problem("FXP109", where, "it is not a constraint", fix))
            continue
        kind, choices = ALLOWED[key]
        choices = tuple(MODES) if key == "weights" and value not in MODES else choices
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key == "precision" and value not in choices:
            # The same words as capture's.
            half = value in ("fp16", "float16", "half")
            why = (
                "float16 needs its loss scaled, which is not done" if half else "it is not a choice"
            )
            problems.append(Problem("FXP109", where, why, "bf16" if half else " or ".join(choices)))
        elif choices and value not in choices:
            problems.append(Problem("FXP109", where, "it is not a choice", " or ".join(choices)))
        elif kind is str and not isinstance(value, str):
            problems.append(Problem("FXP109", where, "it is not a text", ""))
        elif key == "zero" and not (number and value in (0, 1, 2, 3)):
            problems.append(Problem("FXP109", where, "it is not a choice", "0, 1, 2 or 3"))
        elif key == "stages" and not (number and isinstance(value, int) and value >= 1):
            problems.append(Problem("FXP109", where, "it is not a whole number above 0", ""))
        elif key == "ranks" and not (number and isinstance(value, int) and value >= 1):
            problems.append(Problem("FXP109", where, "it is not a whole number above 0", ""))
        elif kind is float and not (number and float(value) > 0):
            problems.append(Problem("FXP109", where, "it is not a number of seconds above 0", ""))
    if not problems:
        problems += [*wish_faults(constraints), *mode_faults(constraints)]
    if not problems:
        problems += [*_virtual_faults(constraints), *_solver_faults(constraints)]
    needing: tuple[str, ...] = ()
    if constraints.get("mesh") in (None, "", "none"):
        needing = SHARDING
    if constraints.get("mesh") == "auto" and constraints.get("zero_axis", DEGREES[0]) != DEGREES[0]:
        needing = ("zero_axis",)  # of a mesh that is searched for it is the data-parallel axis
    fix = 'add the constraint "mesh", such as "dp=2,tp=2"'
    problems += [
        Problem("FXP109", f"constraint {key}={wish!r}", "it says nothing without a mesh", fix)
        for key in needing
        if (wish := constraints.get(key))
    ]
    return problems


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
    said = {"recompute": "none"} | {axis: str(dict(mesh.axes).get(axis, 1)) for axis in DEGREES}
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
