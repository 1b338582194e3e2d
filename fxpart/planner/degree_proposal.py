"""Meshes that the joint problem proposes, to be priced exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fxpart.plan.constraint_table import CONTEXT_AXIS, DATA_AXIS, SHARD_AXIS
from fxpart.planner.constraints import constrains_cuts
from fxpart.planner.device_assignment import StageAssignment, assign_devices, order_of
from fxpart.planner.families.schedule_selection import chooses_cuts
from fxpart.schedule.host_contention import average_computing_stages
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.joint.objective import evaluate, uniform_degrees
from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    JointSolution,
    count_option_devices,
)

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.request import PlanRequest


@dataclass(frozen=True)
class MeshProposal:
    """Degrees shared by all stages: mesh is "dp=2,tp=2", "" where a stage is one rank.

    experts: whether experts are distributed over dp. offload: what is in host memory. choice: the
    complete choice of the joint problem. seconds: its step time by that problem, which assumes that
    all ranks of a host compute all the time. expected_seconds: its step time under the best of the
    competing schedules, with the average number of ranks that compute at once.
    """

    mesh: str
    zero: int
    experts: bool
    offload: str
    choice: JointChoice
    seconds: float
    expected_seconds: float


@dataclass(frozen=True)
class DegreeSearchResult:
    """The joint problem under the user's constraints, its solution, and meshes to price exactly.

    proposals: the best of each mesh, or of each mesh with and without ZeRO, by rising expected step
    time.
    """

    problem: JointProblem
    provenance: dict[str, str]
    solution: JointSolution
    proposals: tuple[MeshProposal, ...]


def make_proposal(
    problem: JointProblem,
    choice: JointChoice,
    pace: Callable[[float], float] | None = None,
    schedules: Sequence[str] = (),
) -> MeshProposal:
    """Return the mesh of a choice whose stages have equal degrees.

    pace: as in choose_degrees. schedules: those under which exact prices compare its stages.
    """
    data, tensor, expert, zero, _, context, shards, offload = uniform_degrees(
        problem, choice.options[0]
    )
    assert expert in (1, data), "the search space has trainable plans only"
    over = ((DATA_AXIS, data // shards), (SHARD_AXIS, shards)) if shards else ((DATA_AXIS, data),)
    sizes = (*over, ("tp", tensor), (CONTEXT_AXIS, context))
    axes = [f"{name}={size}" for name, size in sizes if size > 1]
    seconds = evaluate(problem, choice).seconds
    best = min((seconds, *_reschedule(problem, choice, schedules)))
    busy = average_computing_stages(len(choice.options), choice.microbatches)
    width = count_option_devices(problem, problem.options[choice.options[0]])
    return MeshProposal(
        mesh=",".join(axes),
        zero=zero if data > 1 else 0,
        experts=expert > 1,
        offload=offload,
        choice=choice,
        seconds=seconds,
        expected_seconds=best if pace is None else best * pace(busy * width),
    )


def _reschedule(
    problem: JointProblem, choice: JointChoice, schedules: Sequence[str]
) -> Iterator[float]:
    """Yield the step times of the stages under the other schedules that fit and choose cuts.

    Costs of split backwards, which estimates do not know, are not in them.
    """
    for name in schedules if SCHEDULES[choice.schedule].flushes else ():
        if chooses_cuts(name) and name != choice.schedule:
            found = evaluate(problem, msgspec.structs.replace(choice, schedule=name))
            if all(stage.memory.total <= stage.memory_limit for stage in found.stages):
                yield found.seconds


def select_distinct(rows: Sequence[MeshProposal], levels: bool = False) -> tuple[MeshProposal, ...]:
    """Return the best of each mesh, or of each with and without ZeRO, by rising expected time."""
    kept: dict[tuple[str, bool, str, bool], MeshProposal] = {}
    for one in sorted(rows, key=lambda row: row.expected_seconds):
        kept.setdefault((one.mesh, one.experts, one.offload, levels and one.zero > 0), one)
    return tuple(kept.values())


def assign_proposal_devices(
    chosen: DegreeSearchResult, one: MeshProposal, cluster: Cluster, request: PlanRequest
) -> StageAssignment:
    """Assign the cluster's devices to the proposal's stages.

    With the proposal's stage boundaries, if the request constrains them.
    """
    fixed = constrains_cuts(request.constraints)
    placement = assign_devices(cluster, chosen.problem, one.choice)
    return StageAssignment(
        order=None if placement is None else order_of(cluster, placement),
        starts=one.choice.starts if fixed else None,
        microbatches=one.choice.microbatches,
        stages=len(one.choice.options),
    )
