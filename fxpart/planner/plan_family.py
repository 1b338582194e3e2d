"""The PlanFamily protocol: kinds of plans that are searched besides chains of equal stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.plan.model import Plan
    from fxpart.planner.families.asynchronous_pipeline import SynchronousPlanFactory
    from fxpart.planner.families.schedule_selection import MakeParts
    from fxpart.planner.plan_builder import ShardingSummary
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.request import PlanRequest
    from fxpart.solver.joint.problem import JointProblem
    from fxpart.solver.objective import PartitionEvaluation
    from fxpart.solver.problem import PartitionChoice, PartitionProblem


class PlanFamily(Protocol):
    """A kind of plan, and the requests for which it is searched."""

    @property
    def name(self) -> str:
        """Return the name in the registry."""
        ...

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None where the family can answer the request, else the reason why not."""
        ...


@dataclass(frozen=True)
class PlanSearchResult:
    """A plan, its generated program, and the joint problem of its degrees.

    problem: None where the mesh was fixed.
    """

    plan: Plan
    parts: GeneratedProgram
    problem: JointProblem | None = None


@dataclass(frozen=True)
class ModelContext:
    """Input of a family that plans a model over all meshes.

    search: returns the best plan of a request among the families that are tried later.
    """

    front: PreparedModel
    microbatches: int | None
    search: Callable[[PreparedModel], PlanSearchResult]


class ModelPlanFamily(PlanFamily, Protocol):
    """A family that plans a model over all meshes."""

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the best plan. Raises FXP2xx where nothing fits."""
        ...


@dataclass(frozen=True)
class MeshContext:
    """Input of a family that plans on one priced mesh.

    make, parts: return the plan and the program of a solver's choice. refined: returns a choice's
    evaluation with the measured times of whole stages. copying: returns seconds to read or write a
    byte, by device type. shared: returns how the ranks of a stage share its work. chain: returns
    the best plan under the schedules by which cuts are chosen. time_limit: seconds for one search.
    """

    problem: PartitionProblem
    request: PlanRequest
    make: SynchronousPlanFactory
    parts: MakeParts
    refined: Callable[[PartitionChoice, PartitionEvaluation], PartitionEvaluation]
    copying: Callable[[], tuple[float, ...]]
    shared: Callable[[], ShardingSummary | None]
    chain: Callable[[], tuple[Plan, GeneratedProgram]]
    time_limit: float


class MeshPlanFamily(PlanFamily, Protocol):
    """A family that plans on one mesh."""

    def plan(self, context: MeshContext) -> tuple[Plan, GeneratedProgram]:
        """Return the best plan and its program. Raises FXP2xx where nothing fits."""
        ...
