"""The routes over which the ranks of a program transfer tensors within a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxpart.program.edges import find_stage_edges
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.gradients.tied_parameters import find_tied_parameters
from fxpart.runtime.mesh.mesh_ranks import Ranks, find_receivers
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, STATE, Route


def find_routes(spec: ProgramSpec, ranks: Ranks) -> list[Route]:
    """Return the routes of any schedule of the program, sorted, equal on all ranks.

    ranks: of each stage and mesh rank. Values go from stage to stage, gradients back. Stages that
    share a parameter, tied or as replicas, exchange its gradients with its owner.
    """
    return place_routes((*_find_boundary_routes(spec), *_find_shared_routes(spec)), ranks)


def place_routes(stage_routes: Iterable[tuple[int, int, int]], ranks: Ranks) -> list[Route]:
    """Return the routes between ranks of routes between stages (from stage, to stage, channel)."""
    found = {
        Route(source, target, channel)
        for start, end, channel in stage_routes
        for mesh_rank, source in enumerate(ranks[start])
        for target in find_receivers(ranks, start, end, mesh_rank)
    }
    return sorted(route for route in found if route.source != route.target)


def _find_boundary_routes(spec: ProgramSpec) -> Iterator[tuple[int, int, int]]:
    """Yield (from stage, to stage, channel) of values and of their gradients."""
    for edge in find_stage_edges(spec):
        yield edge.source, edge.target, FORWARD
        if edge.backward:
            yield edge.target, edge.source, BACKWARD


def _find_shared_routes(spec: ProgramSpec) -> Iterator[tuple[int, int, int]]:
    """Yield (from stage, to stage, channel) of what stages with a common parameter exchange."""
    users: dict[str, tuple[int, set[int]]] = {}
    for stage in spec.stages:
        for state in stage.state:
            if state.requires_grad:
                users.setdefault(state.name, (state.owner, set()))[1].add(stage.index)
    for owner, stages in users.values():
        for user in stages - {owner}:
            yield user, owner, STATE
            yield owner, user, STATE
    for item in find_tied_parameters(spec):
        for source, target in item.routes.items():
            yield source, target, STATE
