"""State and metadata of a rank-local module."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx

from fxpart.compat import deferred_code
from fxpart.compiler.graph_edit import value
from fxpart.compiler.node_annotation import MESH_KEY, MESH_RANK_KEY, OUTPUTS_KEY, PARTIAL_KEY
from fxpart.compiler.op_behavior import BEHAVIORS_KEY
from fxpart.sharding import Placements

from .placement_requirements import PlacementRequirements


def local_module(
    whole: fx.GraphModule, graph: fx.Graph, demands: PlacementRequirements, mesh_rank: int
) -> fx.GraphModule:
    """Return the module of a local graph, with its state on the meta device."""
    state = {str(n.target): _attribute(whole, n) for n in graph.find_nodes(op="get_attr")}
    with deferred_code():
        result = fx.GraphModule(state, graph)
    result.meta = {k: v for k, v in whole.meta.items() if k != BEHAVIORS_KEY}
    result.meta[MESH_KEY], result.meta[MESH_RANK_KEY] = demands.mesh, mesh_rank
    result.meta[PARTIAL_KEY] = _partial(whole.graph, demands)
    result.meta[OUTPUTS_KEY] = _returned(whole.graph, demands)
    return result


def _attribute(whole: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Return the state of a local get_attr node, without data."""
    held: torch.Tensor = attrgetter(str(node.target))(whole)
    local = value(node)
    made = torch.empty_strided(local.shape, local.stride(), dtype=held.dtype, device="meta")
    if isinstance(held, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=held.requires_grad)
    return made.requires_grad_(held.requires_grad)


def _partial(graph: fx.Graph, demands: PlacementRequirements) -> dict[str, tuple[str, ...]]:
    """Return the pending gradient-reduction axes of each parameter."""
    names = demands.mesh.names
    return {
        str(n.target): tuple(names[a] for a in sorted(axes))
        for n in graph.find_nodes(op="get_attr")
        if (axes := demands.partial.get(n))
    }


def _returned(graph: fx.Graph, demands: PlacementRequirements) -> tuple[Placements | None, ...]:
    """Return the placements of each returned tensor; None for other values."""
    (node,) = graph.find_nodes(op="output")
    requirements = iter(demands.requirements[node])
    returned: Any = node.args[0]
    return tuple(
        next(requirements).target
        if isinstance(r, fx.Node) and isinstance(value(r), torch.Tensor)
        else None
        for r in returned
    )
