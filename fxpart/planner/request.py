"""The checked request for a plan: all errors in arguments and constraints are raised at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxpart import costmodels
from fxpart.cluster.model import Cluster
from fxpart.compat.optimizer_parts import ANY_PARTS, OptimizerParts
from fxpart.costs import CostModel
from fxpart.environment import read_launch
from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.constraint_table import DATA_AXES, DATA_AXIS, QUEUE, SHARD_AXIS
from fxpart.plan.model import Plan
from fxpart.plan.offload import AUTO, Offload, offload_of, offloads_activations
from fxpart.plan.precision import precision_of, transfer_dtype_of
from fxpart.plan.staleness_penalty import StalenessPenalty
from fxpart.planner.constraints import (
    allowed_recompute,
    find_constraint_problems,
    find_mesh_conflicts,
)
from fxpart.planner.execution_mode import ASYNC, Constraints, mode_of, weights_of
from fxpart.planner.stage_bounds import find_allowed_bounds, find_stage_bounds
from fxpart.planner.time_to_loss import read_penalty
from fxpart.pricing.host_offload import HostOffload
from fxpart.sharding import Mesh
from fxpart.sharding.mesh import parse_axes
from fxpart.solver.joint.constraints.parse import parse_constraints

SINGLE_RANK_MESH = "none"  # as the constraint mesh: every stage is one rank


@dataclass(frozen=True)
class PlanRequest:
    """The checked request.

    mesh: of the ranks of every stage. zero: level 0 to 3. zero_axis: the axis over which optimizer
    state (1), gradients (2) or parameters (3) are sharded; for 1 and 2 also several, "dp,cp".
    experts: whether the experts of mixtures are distributed over dp. cost_model: for this cluster;
    a profile is read once, here. stages: smallest and largest number. ranks: of the whole program,
    None lets the planner choose. open: whether the planner searches for the mesh. penalty: of
    staleness, by which the mode "auto" compares times to a target loss; None: step times.
    divisible: how the optimizer allows to divide parameters.
    """

    cluster: Cluster
    optimizer: Any
    cost_model: CostModel
    constraints: dict[str, int | float | str | bool]
    seed: int
    mesh: Mesh = field(default_factory=Mesh)
    zero: int = 0
    zero_axis: str = ""
    experts: bool = False
    stages: tuple[int, int] = (1, 1)
    ranks: int | None = None
    open: bool = False
    penalty: StalenessPenalty | None = None
    divisible: OptimizerParts = ANY_PARTS

    @property
    def precision(self) -> str:
        """ "bf16" where the model runs under autocast, else "fp32"."""
        return precision_of(self.constraints)

    @property
    def transfer_dtype(self) -> str:
        """Return the dtype in which float32 is sent between ranks, "" for no conversion."""
        return transfer_dtype_of(self.constraints)

    @property
    def offload(self) -> Offload:
        """Return what is in host memory."""
        return offload_of(self.constraints)

    @property
    def mode(self) -> str:
        """ "sync", "async", "auto" or "queue"."""
        return mode_of(self.constraints)

    @property
    def weights(self) -> str:
        """Return the weight mode of an asynchronous pipeline or of queues."""
        return weights_of(self.constraints)

    def find_relative_steps(self, stages: int, microbatches: int) -> float:
        """Return the steps to the target loss relative to synchronous training.

        1 without a penalty, in synchronous plans and with one stage; infinite where not known.
        """
        if self.penalty is None or self.mode != ASYNC or stages == 1:
            return 1.0
        found = self.penalty.find_relative_steps(self.weights, stages, microbatches)
        return math.inf if isinstance(found, str) else found.value

    @property
    def sharded(self) -> bool:
        """Return whether a stage has more than one rank."""
        return self.mesh.size > 1


def make_request(
    cluster: Cluster,
    optimizer: Any,
    cost_model: str | Path | CostModel,
    constraints: Constraints,
    seed: int,
) -> PlanRequest:
    """Return the checked request; raises FXP109 and FXP202 with all problems at once.

    cost_model: a name, or a profile file, which must match this torch version and the cluster's
    devices (FXP405, FXP406).
    """
    problems = list(find_constraint_problems(constraints))
    costs = _cost_model(cost_model, cluster, problems)
    text = constraints.get("mesh", SINGLE_RANK_MESH if mode_of(constraints) == QUEUE else "")
    mesh = Mesh()
    if isinstance(text, str) and text not in (SINGLE_RANK_MESH, "auto"):
        try:
            mesh = Mesh.parse(text)
        except FxpartError as fault:
            problems += fault.problems
    free, given = text in ("", "auto"), constraints
    if not free and not problems:
        problems += find_mesh_conflicts(constraints, mesh)
    if not problems:
        whole, devices = mesh, len(cluster.devices) if free else 0
        mesh = _split_data_axis(constraints, whole, devices, problems)
        if mesh != whole:  # the minor part of the data axis is sharded, whichever name it has
            given = {**constraints, "zero_axis": SHARD_AXIS}
    penalty = None if problems else read_penalty(constraints, optimizer, problems)
    zero, axis = (0, "") if free else _zero(given, mesh, problems)
    ranks = _ranks(constraints, problems)
    stages = find_stage_bounds(constraints, mesh, cluster, ranks, problems)
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
        penalty=penalty,
    )


def with_mesh(
    request: PlanRequest,
    mesh: str,
    zero: int,
    stages: int | None = None,
    *,
    experts: bool = False,
    offload: str | None = None,
) -> PlanRequest:
    """Return the request with this mesh, ZeRO level over its data axis, and number of stages.

    experts: distribute the experts of mixtures over the dp axis. offload: what is in host memory;
    None leaves that of the request.
    """
    parsed = Mesh.parse(mesh)
    most = len(request.cluster.devices) // parsed.size
    if stages is None and request.ranks is not None:
        stages = request.ranks // parsed.size
    problems: list[Problem] = []
    allowed = find_allowed_bounds(request.constraints, most, problems)
    if problems:
        raise FxpartError(problems)
    if request.divisible.apart:
        allowed = (1, 1)
    if offload is not None:
        request = with_offload(request, offload)
    return replace(
        request,
        mesh=parsed,
        zero=zero,
        zero_axis=_default_zero_axis(parsed) if zero else "",
        experts=experts,
        stages=allowed if stages is None else (stages, stages),
        open=False,
    )


def with_offload(request: PlanRequest, offload: str) -> PlanRequest:
    """Return the request with this selected offload where the planner selects it."""
    if request.constraints.get("offload") != AUTO:
        return request
    return replace(request, constraints={**request.constraints, "offload": offload})


def list_offloads(request: PlanRequest, *, training: bool = True) -> tuple[Offload, ...]:
    """Return what may be in host memory: the requested value, or all that free device memory.

    "none" comes first. training: whether the model is trained. Activations are not offloaded where
    all stages are to recompute them selectively.
    """
    if request.constraints.get("offload") != AUTO or request.mode != "sync" or not training:
        return (request.offload,)
    selective = allowed_recompute(request.constraints) == ("selective",)
    found = HostOffload.of("none", request.cluster).others
    return ("none", *(each for each in found if not (selective and offloads_activations(each))))


def check_counts(batch_size: int | None, microbatches: int | None) -> None:
    """Raise FXP109 unless batch_size and microbatches are positive integers where specified."""
    problems = [
        Problem("FXP109", f"{name}={value!r}", "it is not a positive integer", "leave it out")
        for name, value in (("batch_size", batch_size), ("microbatches", microbatches))
        if value is not None
        and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if not problems and batch_size is not None and microbatches is not None:
        if microbatches > batch_size:
            why = f"a batch of {batch_size} cannot be split into {microbatches} microbatches"
            problems.append(Problem("FXP109", "microbatches", why, f"use at most {batch_size}"))
    if problems:
        raise FxpartError(problems)


def find_cluster(given: Cluster | str | Path, plan: Plan | None) -> Cluster:
    """Return the cluster to plan for; with a plan its own, FXP305 if another one is specified.

    Raises FXP402 with all problems of the cluster, such as links of devices that do not exist.
    """
    if plan is not None and given == "auto":
        return plan.cluster
    found = (given if isinstance(given, Cluster) else Cluster.parse(str(given))).validate()
    if plan is not None and found.hash != plan.cluster_hash:
        raise error(
            "FXP305",
            where=f"plan for {plan.cluster.name}, {len(plan.cluster.devices)} devices",
            why=f"the specified cluster is {found.name}, {len(found.devices)} devices, and "
            "differs in its devices or links",
            fix='use cluster="auto" to run the plan unchanged, or plan again for this cluster',
        )
    return found


def _cost_model(
    given: str | Path | CostModel, cluster: Cluster, problems: list[Problem]
) -> CostModel | None:
    """Return the cost model for the cluster; None with a further problem where it is unusable."""
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
    """Return ZeRO level and axis, by default the minor data axis or the only axis of the mesh."""
    level, axis = constraints.get("zero", 0), constraints.get("zero_axis", "")
    if not isinstance(level, int) or not isinstance(axis, str) or (not level and not axis):
        return 0, ""
    names = mesh.names
    axes = parse_axes(axis or _default_zero_axis(mesh))
    why, fix = "", 'set "zero_axis" to one of them'
    if names and (not axes or {*axes} - {*names} or len(axes) > len({*axes})):
        why = f"the mesh has the axes {', '.join(names)}"
    elif level == 3 and len(axes) > 1:
        why, fix = "ZeRO 3 shards parameters over one axis", "use one axis, or zero=2"
    if why:
        where = f"zero_axis={axis!r}" if axis else f"zero={level}"
        problems.append(Problem("FXP109", where, why, fix))
    return (level, ",".join(name for name in names if name in axes)) if level else (0, "")


def _default_zero_axis(mesh: Mesh) -> str:
    """Return the axis that ZeRO shards by default; "" where it must be specified."""
    found = [axis for axis in reversed(DATA_AXES) if axis in mesh.names]
    found += mesh.names if len(mesh.names) == 1 else ()
    return found[0] if found else ""


def _split_data_axis(
    constraints: Constraints, mesh: Mesh, devices: int, problems: list[Problem]
) -> Mesh:
    """Return the mesh with its data axis divided as the constraint ``shard_degree`` requests.

    devices: of the cluster where the mesh is open, which then is only checked; else 0.
    """
    numbers = [
        requested.numbers
        for requested in parse_constraints(constraints)
        if (requested.kind, requested.key) == ("fix", "shard_degree")
    ]
    data = mesh.count(*DATA_AXES)
    if (
        not numbers
        or set(numbers[0]) == {0}
        or (SHARD_AXIS in mesh.names and set(numbers[0]) == {mesh.count(SHARD_AXIS)})
    ):
        return mesh
    (allowed,) = numbers
    degree, why = allowed[0], ""
    if devices:
        if 0 not in allowed and 2 * min(allowed) > devices:
            groups = f"at least two groups of {min(allowed)} devices"
            why = f"hybrid sharding needs {groups}, but the cluster has {devices} devices"
        data = devices
    elif len(allowed) > 1:
        why = f"the mesh {mesh} fixes all degrees, but several shard degrees are requested"
    elif SHARD_AXIS in mesh.names:
        why = f"the axis {SHARD_AXIS} of the mesh {mesh} has another size"
    elif not 1 < degree < data or data % degree:
        ranks = f"{data} data-parallel ranks of {mesh}" if mesh.axes else "single rank of a stage"
        why = f"{degree} is no divisor between 1 and the {ranks}"
    elif not constraints.get("zero"):
        why = "without ZeRO nothing is sharded"
    elif constraints.get("zero_axis", DATA_AXIS) not in DATA_AXES:
        why = f"ZeRO shards over another axis, {constraints['zero_axis']}"
    if why:
        divisors = ", ".join(str(n) for n in range(2, data) if data % n == 0)
        fix = f"use {divisors}, with zero=1, 2 or 3" if divisors else "remove shard_degree"
        if constraints.get("zero_axis", DATA_AXIS) not in DATA_AXES:
            fix = "remove shard_degree, or zero_axis"
        where = f"constraint shard_degree={constraints['shard_degree']!r}"
        problems.append(Problem("FXP109", where, why, fix))
    if why or devices:
        return mesh
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        split = ((DATA_AXIS, size // degree), (SHARD_AXIS, degree))
        axes += split if name == DATA_AXIS else [(name, size)]
    return Mesh(tuple(axes))


def _ranks(constraints: Constraints, problems: list[Problem]) -> int | None:
    """Return the fixed number of ranks: as started by torchrun, or as requested."""
    found, given = read_launch(), constraints.get("ranks")
    requested = given if isinstance(given, int) and not isinstance(given, bool) else None
    if found is None:
        return requested
    if requested is not None and requested != found.world:
        where, why = f"constraint ranks={requested}", f"torchrun started {found.world} processes"
        problems.append(Problem("FXP502", where, why, f"use torchrun --nproc-per-node {requested}"))
    return found.world
