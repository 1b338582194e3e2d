"""The constraints of compile(): their values, and which of them conflict with a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpart.errors import Problem, error
from fxpart.plan.constraint_table import (
    CONSTRAINTS,
    CONTEXT_AXIS,
    DATA_AXES,
    DATA_AXIS,
    DEGREES,
    QUEUE,
    SHARD_AXIS,
    ConstraintSpec,
    suggest_names,
)
from fxpart.plan.model import Plan
from fxpart.plan.offload import offload_of, offloads_activations
from fxpart.planner.execution_mode import (
    ASYNC,
    Constraints,
    as_synchronous,
    find_mode_problems,
    mode_of,
)
from fxpart.schedule.spec import DEFAULT_SCHEDULE, find_built, list_schedules
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.parse import find_constraint_problems as find_decision_problems
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.problem import RECOMPUTE_MODES, Recompute


def find_constraint_problems(constraints: Constraints) -> list[Problem]:
    """Return one problem for each unknown, invalid or conflicting constraint."""
    problems = []
    for key, value in constraints.items():
        where = f"constraint {key}={str(value)[:80]!r}"
        spec = CONSTRAINTS.get(key)
        if spec is None:
            fix = suggest_names(key, tuple(CONSTRAINTS))
            problems.append(Problem("FXP109", where, "there is no constraint of this name", fix))
            continue
        found = _find_wrong_value(spec, value)
        if found is not None:
            problems.append(Problem("FXP109", where, *found))
    if not problems:
        problems += [*find_decision_problems(constraints), *find_mode_problems(constraints)]
    if not problems:
        problems += [
            *_find_virtual_stage_problems(constraints),
            *_find_solver_problems(constraints),
            *_find_offload_problems(constraints),
            *_find_stage_degree_problems(constraints),
        ]
    needing: tuple[str, ...] = ()
    if constraints.get("mesh") in (None, "", "none"):
        needing = tuple(name for name, spec in CONSTRAINTS.items() if spec.needs == "mesh")
    if constraints.get("mesh") == "auto" and constraints.get("zero_axis", DATA_AXIS) != DATA_AXIS:
        needing = ("zero_axis",)  # with mesh=auto, ZeRO always uses the data-parallel axis
    fix = 'add the constraint "mesh", such as "dp=2,tp=2"'
    problems += [
        Problem(
            "FXP109", f"constraint {key}={constraint!r}", "this constraint requires `mesh`", fix
        )
        for key in needing
        if (constraint := constraints.get(key))
    ]
    return problems


def _find_wrong_value(spec: ConstraintSpec, value: object) -> tuple[str, str] | None:
    """Return the cause and the fix for an invalid value; None where it is valid."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    choices = " or ".join(map(str, spec.list_choices()))
    if spec.name == "precision" and value in ("fp16", "float16", "half"):
        return "float16 needs loss scaling, which fxpart does not implement", "use bf16"
    if spec.kind == "choice" and not spec.accepts(value):
        return "the value is not one of the choices", f"use {choices}"
    if spec.kind == "numbers" and spec.choices and not (number and spec.accepts(value)):
        return "the value is not one of the choices", f"use {choices}"
    if spec.kind in ("text", "entries") and not spec.same_as and not isinstance(value, str):
        return "the value is not a string", "pass a string"
    if spec.kind == "count" and not (number and isinstance(value, int) and value >= spec.least):
        return "the value is not a positive integer", "pass a positive integer"
    if spec.kind == "seconds" and not (number and float(str(value)) > 0):
        return "the value is not a positive number of seconds", "pass a positive number"
    return None


def _find_virtual_stage_problems(constraints: Constraints) -> Iterator[Problem]:
    """Yield FXP109 where virtual stages are requested but no requested schedule has them."""
    wanted = [w for w in parse_constraints(constraints) if (w.kind, w.key) == ("fix", "virtual")]
    if not wanted or any("1" in constraint.values for constraint in wanted):
        return
    mode = mode_of(constraints)
    names = str(as_synchronous(constraints).get("schedule", DEFAULT_SCHEDULE)).split(",")
    if mode in ("sync", "auto") and any(_is_virtual(name.strip()) for name in names):
        return
    schedules = " or ".join(f"schedule={name}" for name in list_schedules(is_virtual=True))
    yield Problem(
        "FXP109",
        f"constraint virtual={constraints['virtual']!r}",
        f"mode={mode} has one stage per rank"
        if mode in (ASYNC, QUEUE)
        else f"schedule={','.join(names)} has one stage per rank",
        f"mode=sync with {schedules}",
    )


def _is_virtual(name: str) -> bool:
    spec = find_built(name)
    return spec is not None and spec.is_virtual


def _find_solver_problems(constraints: Constraints) -> Iterator[Problem]:
    """Yield FXP109 for a solver that cannot plan an asynchronous pipeline."""
    solver = constraints.get("solver", "auto")
    if mode_of(constraints) == ASYNC and solver not in ("auto", "dp"):
        yield Problem(
            "FXP109",
            f"constraint solver={solver!r}",
            "stage boundaries of an asynchronous pipeline are computed by dynamic programming only",
            "use solver=dp or mode=sync",
        )


def _find_offload_problems(constraints: Constraints) -> Iterator[Problem]:
    """Yield FXP109 where offload is requested with decisions that exclude it."""
    offload, mode = constraints.get("offload", "none"), mode_of(constraints)
    if offload != "none" and mode != "sync":
        why = f"mode={mode} may plan stages that update on their own, without an offload"
        yield Problem("FXP109", f"constraint offload={offload!r}", why, "use mode=sync")
    if offloads_activations(str(offload)) and constraints.get("recompute") == "selective":
        why = "selective recomputation stores results of ops on the device"
        yield Problem(
            "FXP109", f"constraint offload={offload!r}", why, "use recompute=full or recompute=none"
        )


def list_stage_degrees(constraints: Constraints) -> tuple[int, ...]:
    """Return the tensor degree of each stage where the constraints give them; else ()."""
    found = [w for w in parse_constraints(constraints) if w.key == "tp" and w.by_stage]
    return found[0].numbers if found else ()


def _find_stage_degree_problems(constraints: Constraints) -> Iterator[Problem]:
    """Yield FXP109 for tensor degrees by stage that cannot be planned or trained."""
    degrees = list_stage_degrees(constraints)
    if not degrees:
        return
    fixed = {w.key: w for w in parse_constraints(constraints) if w.kind == "fix"}
    why, fix = "", ""
    if len(set(degrees)) != 2 or min(degrees) != 1:
        why = "tensor degrees of stages must be 1 or one other number, and both must occur"
        fix = 'use "1|2", or a single degree for all stages'
    elif "pp" in fixed and str(len(degrees)) not in fixed["pp"].values:
        why = f"it gives the degrees of {len(degrees)} stages, but {fixed['pp']} is requested"
        fix = f"use stages={len(degrees)}, or remove it"
    elif mode_of(constraints) != "sync":
        why, fix = f"mode={mode_of(constraints)} has stages of equal degrees", "use mode=sync"
    elif constraints.get("mesh", "auto") not in ("", "auto"):
        why, fix = "a mesh fixes one degree for all stages", "remove mesh, or tp"
    elif constraints.get("copies", "auto") == "always":
        why, fix = "stages of different degrees have no replicas", "remove copies"
    elif offload_of(constraints) != "none":
        why, fix = "offloading needs stages of equal degrees", "remove offload"
    for key, plain in (("zero", "0"), ("ep", "1"), (CONTEXT_AXIS, "1"), ("shard_degree", "0")):
        if not why and key in fixed and plain not in fixed[key].values:
            why, fix = f"stages of different degrees need {key}={plain}", f"remove {key}"
    if why:
        yield Problem("FXP109", f"constraint tp={'|'.join(map(str, degrees))}", why, fix)


def merge_data_axes(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of the mesh's axes by name, those of both data axes as one."""
    axes = {name: size for name, size in mesh.axes if name != SHARD_AXIS}
    return axes | ({DATA_AXIS: mesh.count(*DATA_AXES)} if SHARD_AXIS in mesh.names else {})


def find_mesh_conflicts(constraints: Constraints, mesh: Mesh) -> list[Problem]:
    """Return one problem for each fixed decision that contradicts the mesh."""
    axes = merge_data_axes(mesh)
    fixed = {axis: {str(axes.get(axis, 1))} for axis in DEGREES}
    if "ep" not in axes:  # experts may be distributed over the data-parallel ranks
        fixed["ep"] |= fixed[DATA_AXIS]
    if mode_of(constraints) in (ASYNC, QUEUE):
        fixed["recompute"] = {CONSTRAINTS["recompute"].plain}
    given = (
        f"the mesh {constraints['mesh']}"
        if "mesh" in constraints
        else f"the mode {mode_of(constraints)}"
    )
    return [
        Problem(
            "FXP109",
            f"constraint {constraint.key}={','.join(constraint.values)}",
            f"with {given} each stage has {constraint.key}="
            f"{' or '.join(sorted(fixed[constraint.key]))}",
            f"remove the constraint {constraint.key}, or {given}"
            if constraint.key in DEGREES
            else 'use trainer(recompute="full") to recompute with any plan',
        )
        for constraint in parse_constraints(constraints)
        if constraint.kind == "fix"
        and constraint.key in fixed
        and not fixed[constraint.key] & {*constraint.values}
    ]


def allowed_recompute(constraints: Constraints) -> tuple[Recompute, ...]:
    """Return the modes of activation recomputation that the planner may choose for a stage.

    "none" where weights change between a forward and its backward (asynchronous plans, queues).
    Raises FXP202 where the constraints leave none.
    """
    found: tuple[Recompute, ...] = RECOMPUTE_MODES
    for constraint in parse_constraints(constraints):
        if constraint.key != "recompute":
            continue
        values = constraint.values or tuple(mode for mode in RECOMPUTE_MODES if mode != "none")
        found = tuple(m for m in found if (m in values) == (constraint.kind == "fix"))
    if not found:
        raise error(
            "FXP202",
            where=f"recompute={constraints.get('recompute')}, forbid={constraints.get('forbid')}",
            why="the constraints leave no mode of activation recomputation",
            fix=f"allow one of {', '.join(RECOMPUTE_MODES)}",
        )
    if offloads_activations(offload_of(constraints)):
        found = tuple(mode for mode in found if mode != "selective")
    return ("none",) if mode_of(constraints) in (ASYNC, QUEUE) else found


def list_fixed(constraints: Constraints, key: str) -> tuple[int, ...]:
    """Return the numbers to which the constraints fix a decision; none if they do not."""
    found = parse_constraints(constraints)
    return tuple(n for w in found if (w.kind, w.key) == ("fix", key) for n in w.numbers)


def find_exclusion(constraints: Constraints, key: str, value: int) -> str:
    """Return the constraint that does not allow a value of a decision, "" if there is none."""
    return next(
        (
            str(constraint)
            for constraint in parse_constraints(constraints)
            if constraint.key == key and (value in constraint.numbers) != (constraint.kind == "fix")
        ),
        "",
    )


def constrains_cuts(constraints: Constraints) -> bool:
    """Return whether a constraint fixes or forbids stage boundaries."""
    return any(
        w.kind in ("stage", "layout") or w.key == "cut" for w in parse_constraints(constraints)
    )


def allowed_stages(constraints: Constraints, most: int) -> tuple[int, ...]:
    """Return the stage counts up to ``most`` that the constraints allow."""
    allowed: Sequence[int] = range(1, most + 1)
    for constraint in parse_constraints(constraints):
        if constraint.key == "pp" and constraint.kind == "fix":
            allowed = [n for n in allowed if n in constraint.numbers]
        elif constraint.key == "pp":
            forbidden = constraint.numbers or range(2, most + 1)
            allowed = [n for n in allowed if n not in forbidden]
    return tuple(allowed)


def with_numbers(
    constraints: Constraints | None,
    precision: str | None,
    transfer_dtype: str | None,
    plan: Plan | None = None,
) -> dict[str, int | float | str | bool]:
    """Return the constraints with the arguments ``precision`` and ``transfer_dtype`` added.

    plan: the plan that is applied, if any. It determines both values; raises FXP305 where an
    argument contradicts it.
    """
    found = dict(constraints or {})
    for name, given in (("precision", precision), ("transfer_dtype", transfer_dtype)):
        if given is not None:
            found[name] = given
        if plan is None:
            continue
        requested, planned = found.get(name), getattr(plan, name)
        if requested is not None and requested != planned:
            raise error(
                "FXP305",
                where=f"{name}={requested!r}",
                why=f"the plan for {plan.model.name} was made with {name}={planned!r}",
                fix="remove the argument to run the plan unchanged, or plan again",
            )
        if planned not in ("fp32", ""):
            found[name] = planned
    return found


def with_coupling(
    constraints: dict[str, int | float | str | bool], batch_coupling: str | None
) -> dict[str, int | float | str | bool]:
    """Return the constraints with the argument ``batch_coupling`` added."""
    if batch_coupling is None:
        return constraints
    return {**constraints, "batch_coupling": batch_coupling}


def match_capture_precision(
    constraints: dict[str, int | float | str | bool], precision: str
) -> dict[str, int | float | str | bool]:
    """Return the constraints for a graph captured in this precision.

    Raises FXP109 where they request another precision.
    """
    if constraints.get("precision", precision) != precision:
        raise error(
            "FXP109",
            where=f"precision={constraints['precision']!r}",
            why=f"the model was captured in {precision}",
            fix="compile the model again",
        )
    return constraints if precision == "fp32" else {**constraints, "precision": precision}


def check_trainable(constraints: Constraints) -> None:
    """Raise FXP109 where a requested schedule does not train."""
    wanted = str(as_synchronous(constraints).get("schedule", DEFAULT_SCHEDULE)).split(",")
    trained = (DEFAULT_SCHEDULE, *list_schedules(trains=True, flushes=True))
    wrong = [name.strip() for name in wanted if name.strip() not in trained]
    if wrong:
        raise error(
            "FXP109",
            where=f"schedule={constraints['schedule']}",
            why=f"the runtime cannot train with {wrong[0]}",
            fix=f"use {' or '.join(dict.fromkeys(trained))}",
        )
