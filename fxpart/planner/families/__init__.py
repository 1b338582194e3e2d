"""Plan families: one module each, and the registries by which the search finds them.

The first family of a registry that accepts a request plans it. If none accepts it, the plan is a
chain of equal stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fxpart.planner.plan_family import MeshPlanFamily, ModelPlanFamily, PlanFamily
from fxpart.registry import LazyEntry, Registry

if TYPE_CHECKING:
    from fxpart.planner.request import PlanRequest

Family = TypeVar("Family", bound=PlanFamily)

_MODULE = "fxpart.planner.families"
MODE_FAMILIES: Registry[ModelPlanFamily] = Registry(
    "plan family of a mode", {"queues": LazyEntry(f"{_MODULE}.queue_routing:QUEUES")}
)
REPLICA_FAMILIES: Registry[ModelPlanFamily] = Registry(
    "plan family",
    {
        "stage degrees": LazyEntry(f"{_MODULE}.stage_degrees:STAGE_DEGREES"),
        "replicated stages": LazyEntry(f"{_MODULE}.replicated_stages:REPLICATED_STAGES"),
    },
)
MESH_FAMILIES: Registry[MeshPlanFamily] = Registry(
    "plan family of a mesh",
    {
        "asynchronous pipeline": LazyEntry(
            f"{_MODULE}.asynchronous_pipeline:ASYNCHRONOUS_PIPELINE"
        ),
        "schedule selection": LazyEntry(f"{_MODULE}.schedule_selection:SCHEDULE_SELECTION"),
    },
)


def find_family(table: Registry[Family], request: PlanRequest) -> Family | None:
    """Return the first family of a table that accepts the request; None where none does."""
    return next(
        (one for one in table.values() if one.accepts(request, request.cluster) is None), None
    )
