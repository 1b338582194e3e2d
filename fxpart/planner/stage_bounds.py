"""The smallest and largest number of stages of a plan request."""

from __future__ import annotations

from fxpart.cluster.model import Cluster
from fxpart.errors import Problem
from fxpart.plan.constraint_table import QUEUE
from fxpart.planner.constraints import allowed_stages
from fxpart.planner.execution_mode import Constraints, mode_of
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.parse import find_constraint_problems as find_decision_problems
from fxpart.solver.joint.constraints.parse import parse_constraints


def fixed_stages(constraints: Constraints) -> int | None:
    """Return the number of stages fixed by ``stages`` or ``pp``, None where neither is fixed."""
    counts = [
        requested.numbers
        for requested in parse_constraints(constraints)
        if (requested.kind, requested.key) == ("fix", "pp") and len(requested.numbers) == 1
    ]
    return min(counts)[0] if counts else None


def find_allowed_bounds(
    constraints: Constraints, most: int, problems: list[Problem]
) -> tuple[int, int]:
    """Return the smallest and largest allowed number of stages; FXP202 if there is none.

    Forbidden numbers in between are rejected when the plan is checked.
    """
    allowed = allowed_stages(constraints, most)
    if not allowed:
        problems.append(Problem(
            "FXP202",
            ", ".join(
                f"constraint {key}={constraints[key]!r}"
                for key in ("stages", "pp", "forbid")
                if key in constraints
            ),
            f"no number of stages from 1 to {most} satisfies all of them",
            "specify one number of stages",
        ))  # fmt: skip
        return 1, 1
    return allowed[0], allowed[-1]


def find_stage_bounds(
    constraints: Constraints,
    mesh: Mesh,
    cluster: Cluster,
    ranks: int | None,
    problems: list[Problem],
) -> tuple[int, int]:
    """Return the smallest and largest number of stages by constraints, ranks and devices.

    Where replicas are requested, a number of ranks is only an upper bound for the stages.
    """
    replicated = constraints.get("copies") == "always"
    width, devices = mesh.size, len(cluster.devices)
    if find_decision_problems(constraints):
        return 1, 1
    requested = fixed_stages(constraints)
    if width > devices:
        problems.append(Problem(
            "FXP202",
            f"mesh {mesh}",
            f"a stage has {width} ranks, but {cluster.name} has {devices} devices",
            f"use a cluster of {width} devices or more, or a smaller mesh",
        ))  # fmt: skip
        return 1, 1
    if constraints.get("mesh") in (None, "", "auto") and mode_of(constraints) != QUEUE:
        return find_allowed_bounds(constraints, devices, problems)
    if ranks is not None and requested is None:
        if ranks % width:
            why = f"each stage has {width} ranks, which does not divide the {ranks} processes"
            fix = f"start a multiple of {width} processes, or change the mesh"
            problems.append(Problem("FXP502", f"mesh {mesh}", why, fix))
            return 1, 1
        if replicated:
            return find_allowed_bounds(constraints, min(ranks, devices) // width, problems)
        requested = ranks // width
    elif (
        ranks is not None
        and requested is not None
        and width > 1
        and requested * width != ranks
        and (not replicated or ranks % width or requested * width > ranks)
    ):
        problems.append(
            Problem(
                "FXP502",
                f"{ranks} processes",
                f"the constraints request {requested} stages of {width} ranks",
                f"use torchrun --nproc-per-node {requested * width}, or other stages or mesh",
            )
        )
    if requested is not None and width > 1 and requested * width > devices:
        problems.append(Problem(
            "FXP202",
            f"stages={requested}, mesh {mesh}",
            f"they need {requested * width} devices, but {cluster.name} has {devices}",
            f"use at most {devices // width} stages of {width} ranks",
        ))  # fmt: skip
    if requested is None or requested * width <= devices:
        bounds = find_allowed_bounds(constraints, devices // width, problems)
        return bounds if requested is None else (requested, requested)
    return requested, requested
