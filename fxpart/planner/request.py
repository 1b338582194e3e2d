"""What compile() was asked: every argument and constraint checked, all faults at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxpart import costmodels
from fxpart.cluster.model import Cluster
from fxpart.costs import CostModel
from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.constraint_table import DATA_AXIS, QUEUE
from fxpart.plan.model import Plan
from fxpart.plan.precision import precision_of, transfer_dtype_of
from fxpart.planner.constraints import (
    allowed_stages,
    find_constraint_problems,
    find_mesh_conflicts,
)
from fxpart.planner.execution_mode import Constraints, mode_of, weights_of
from fxpart.sharding import Mesh
from fxpart.solver.joint.constraints.parse import find_constraint_problems as wish_faults
from fxpart.solver.joint.constraints.parse import parse_constraints

ONE_LANE = "none"  # as a mesh: every stage is one rank


@dataclass(frozen=True)
class PlanRequest:
    """What is wanted, checked.

    mesh: the lanes of every stage, None where the planner is to choose them. zero: 0 to 3.
    zero_axis: along which axis optimizer state (1), gradients (2) or parameters (3) are cut.
    cost_model: for this cluster; a profile is read once, here.
    stages: least and most. ranks: of the whole program, None for what is best.
    """

    cluster: Cluster
    optimizer: Any
    cost_model: CostModel
    constraints: dict[str, int | float | str | bool]
    seed: int
    mesh: Mesh = field(default_factory=Mesh)
    zero: int = 0
    zero_axis: str = ""
    stages: tuple[int, int] = (1, 1)
    ranks: int | None = None
    open: bool = False

    @property
    def precision(self) -> str:
        """ "bf16" where the model is to run under autocast, else "fp32"."""
        return precision_of(self.constraints)

    @property
    def transfer_dtype(self) -> str:
        """As what float32 goes from rank to rank, "" as it is."""
        return transfer_dtype_of(self.constraints)

    @property
    def mode(self) -> str:
        """ "sync", "async", "auto" or "queue"."""
        return mode_of(self.constraints)

    @property
    def weights(self) -> str:
        """The weight mode of a plan that does not drain, or of queues."""
        return weights_of(self.constraints)

    @property
    def sharded(self) -> bool:
        """Whether a stage is more than one rank."""
        return self.mesh.size > 1


def make_request(
    cluster: Cluster,
    optimizer: Any,
    cost_model: str | Path | CostModel,
    constraints: Constraints,
    seed: int,
) -> PlanRequest:
    """The request; raises FXP109 and FXP202 with everything that is wrong or does not fit.

    cost_model: a name, or a profile's file, which has to be of this torch and of the cluster's
    devices (FXP405, FXP406).
    """
    problems = list(find_constraint_problems(constraints))
    costs = _cost_model(cost_model, cluster, problems)
    text = constraints.get("mesh", ONE_LANE if mode_of(constraints) == QUEUE else "")
    mesh = Mesh()
    if isinstance(text, str) and text not in (ONE_LANE, "auto"):
        try:
            mesh = Mesh.parse(text)
        except FxpartError as fault:
            problems += fault.problems
    free = text in ("", "auto")
    if not free and not problems:
        problems += find_mesh_conflicts(constraints, mesh)
    zero, axis = (0, "") if free else _zero(constraints, mesh, problems)
    ranks = _ranks(constraints, problems)
    stages = _stages(constraints, mesh, cluster, ranks, problems)
    if problems or costs is None:
        raise FxpartError(problems)
    return PlanRequest(
        cluster=cluster,
        optimizer=optimizer if optimizer is not None else "adamw",
        cost_model=costs,
        constraints=dict(constraints),
        seed=seed,
        mesh=mesh,
        zero=zero,
        zero_axis=axis,
        stages=stages,
        ranks=ranks,
        open=free,
    )


def with_mesh(request: PlanRequest, mesh: str, zero: int, stages: int | None = None) -> PlanRequest:
    """The request with this mesh, ZeRO level over its dp axis, and number of stages."""
    lanes = Mesh.parse(mesh)
    most = len(request.cluster.devices) // lanes.size
    if stages is None and request.ranks is not None:
        stages = request.ranks // lanes.size
    problems: list[Problem] = []
    allowed = _bounds(request.constraints, most, problems)
    if problems:
        raise FxpartError(problems)
    return replace(
        request,
        mesh=lanes,
        zero=zero,
        zero_axis=DATA_AXIS if zero else "",
        stages=allowed if stages is None else (stages, stages),
        open=False,
    )


def check_counts(batch_size: int | None, microbatches: int | None) -> None:
    """batch_size and microbatches, where given, are whole and above 0; FXP109."""
    problems = [
        Problem("FXP109", f"{name}={value!r}", "it must be a whole number above 0", "")
        for name, value in (("batch_size", batch_size), ("microbatches", microbatches))
        if value is not None
        and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if not problems and batch_size is not None and microbatches is not None:
        if microbatches > batch_size:
            why = f"a batch of {batch_size} cannot be cut into {microbatches} microbatches"
            problems.append(Problem("FXP109", "microbatches", why, f"at most {batch_size}"))
    if problems:
        raise FxpartError(problems)


def find_cluster(given: Cluster | str | Path, plan: Plan | None) -> Cluster:
    """The cluster to plan for; with a plan, the plan's own, and FXP305 if another one was named.

    FXP402 with everything that is wrong with the cluster, such as links of devices that are absent.
    """
    if plan is not None and given == "auto":
        return plan.cluster
    found = (given if isinstance(given, Cluster) else Cluster.parse(str(given))).validate()
    if plan is not None and found.hash != plan.cluster_hash:
        raise error(
            "FXP305",
            where=f"plan for {plan.cluster.name}, {len(plan.cluster.devices)} devices",
            why=f"the cluster given is {found.name}, {len(found.devices)} devices, and differs in "
            "its devices or links",
            fix='leave cluster="auto" to run the plan as it is, or plan again for this cluster',
        )
    return found


def _cost_model(
    given: str | Path | CostModel, cluster: Cluster, problems: list[Problem]
) -> CostModel | None:
    """The cost model for the cluster; None, and a problem more, where it cannot be used."""
    import torch

    try:
        if not isinstance(given, str | Path):
            costmodels.check_cost_model(given, f"cost_model={type(given).__name__}")
            return given
        return costmodels.find(given, cluster, torch=str(torch.__version__))
    except FxpartError as fault:
        problems += fault.problems
        return None


def _zero(constraints: Constraints, mesh: Mesh, problems: list[Problem]) -> tuple[int, str]:
    """ZeRO's level and axis; the axis is dp, or the mesh's only one, where it is not named."""
    level, axis = constraints.get("zero", 0), constraints.get("zero_axis", "")
    if not isinstance(level, int) or not isinstance(axis, str) or (not level and not axis):
        return 0, ""
    names = mesh.names
    if not axis:
        axis = DATA_AXIS if DATA_AXIS in names else names[0] if len(names) == 1 else ""
    if axis not in names and names:
        why = f"the mesh has the axes {', '.join(names)}"
        where = f"zero_axis={axis!r}" if axis else f"zero={level}"
        fix = 'name one of them in "zero_axis"'
        problems.append(Problem("FXP109", where, why, fix))
    return (level, axis) if level else (0, "")


def _ranks(constraints: Constraints, problems: list[Problem]) -> int | None:
    """How many ranks there have to be: as torchrun started, or as asked for."""
    found, given = read_launch(), constraints.get("ranks")
    wish = given if isinstance(given, int) and not isinstance(given, bool) else None
    if found is None:
        return wish
    if wish is not None and wish != found.world:
        where, why = f"constraint ranks={wish}", f"{found.world} processes were started"
        problems.append(Problem("FXP502", where, why, f"torchrun --nproc-per-node {wish}"))
    return found.world


def fixed_stages(constraints: Constraints) -> int | None:
    """The number of stages that ``stages`` or ``pp`` fixes, None where neither fixes one."""
    counts = [
        wish.numbers
        for wish in parse_constraints(constraints)
        if (wish.kind, wish.key) == ("fix", "pp") and len(wish.numbers) == 1
    ]
    return min(counts)[0] if counts else None


def _bounds(constraints: Constraints, most: int, problems: list[Problem]) -> tuple[int, int]:
    """The least and most stages up to ``most`` that the constraints allow; FXP202 if there is none.

    A number between them that is not allowed is found when the plan is checked.
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
            "give one number of stages",
        ))  # fmt: skip
        return 1, 1
    return allowed[0], allowed[-1]


def _stages(
    constraints: Constraints,
    mesh: Mesh,
    cluster: Cluster,
    ranks: int | None,
    problems: list[Problem],
) -> tuple[int, int]:
    """The least and most stages: as wished, as there are ranks, or as devices allow."""
    lanes, devices = mesh.size, len(cluster.devices)
    if wish_faults(constraints):
        return 1, 1
    wish = fixed_stages(constraints)
    if lanes > devices:
        problems.append(Problem(
            "FXP202",
            f"mesh {mesh}",
            f"a stage has {lanes} ranks, and {cluster.name} has {devices} devices",
            f"a cluster of {lanes} devices or more, or a smaller mesh",
        ))  # fmt: skip
        return 1, 1
    if constraints.get("mesh") in (None, "", "auto") and mode_of(constraints) != QUEUE:
        return _bounds(constraints, devices, problems)
    if ranks is not None and wish is None:
        if ranks % lanes:
            why = f"each stage has {lanes} ranks, and there are {ranks} processes"
            fix = f"start a multiple of {lanes} processes, or change the mesh"
            problems.append(Problem("FXP502", f"mesh {mesh}", why, fix))
            return 1, 1
        wish = ranks // lanes
    elif ranks is not None and wish is not None and lanes > 1 and wish * lanes != ranks:
        problems.append(
            Problem(
                "FXP502",
                f"{ranks} processes",
                f"the constraints ask for {wish} stages of {lanes} ranks",
                f"torchrun --nproc-per-node {wish * lanes}, or other stages or mesh",
            )
        )
    if wish is not None and lanes > 1 and wish * lanes > devices:
        problems.append(Problem(
            "FXP202",
            f"stages={wish}, mesh {mesh}",
            f"they need {wish * lanes} devices, and {cluster.name} has {devices}",
            f"at most {devices // lanes} stages of {lanes} ranks",
        ))  # fmt: skip
    if wish is None or wish * lanes <= devices:
        bounds = _bounds(constraints, devices // lanes, problems)
        return bounds if wish is None else (wish, wish)
    return wish, wish
