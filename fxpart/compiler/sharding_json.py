"""The mesh and shardings of a graph as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpart.compiler.node_annotation import (
    LANE_KEY,
    MESH_KEY,
    OUTPUTS_KEY,
    PARTIAL_KEY,
    NodeSharding,
)
from fxpart.sharding import Mesh, format_placements, parse_placements

Json = Any


def mesh_to_json(module: fx.GraphModule) -> dict[str, Json]:
    """Mesh, lane and what a local graph notes; nothing for a graph without a mesh."""
    mesh = module.meta.get(MESH_KEY)
    if mesh is None:
        return {}
    found: dict[str, Json] = {"mesh": str(mesh)}
    if LANE_KEY in module.meta:
        found["lane"] = module.meta[LANE_KEY]
        found["partial"] = {n: list(axes) for n, axes in module.meta[PARTIAL_KEY].items()}
        found["outputs"] = [
            None if held is None else format_placements(held, mesh)
            for held in module.meta[OUTPUTS_KEY]
        ]
    return found


def mesh_from_json(data: Mapping[str, Json], module: fx.GraphModule) -> None:
    """The inverse of :func:`mesh_to_json`."""
    if "mesh" not in data:
        return
    mesh = module.meta[MESH_KEY] = Mesh.parse(data["mesh"])
    if "lane" in data:
        module.meta[LANE_KEY] = data["lane"]
        module.meta[PARTIAL_KEY] = {n: tuple(axes) for n, axes in data["partial"].items()}
        module.meta[OUTPUTS_KEY] = tuple(
            None if held is None else parse_placements(held, mesh) for held in data["outputs"]
        )


def sharding_to_json(known: NodeSharding, mesh: Mesh) -> Json:
    """A node's sharding."""
    return [
        list(known.strategy),
        [format_placements(held, mesh) for held in known.results],
        list(known.origins),
    ]


def sharding_from_json(held: Json, mesh: Mesh) -> NodeSharding:
    """The inverse of :func:`sharding_to_json`."""
    strategy, results, origins = held
    placements = tuple(parse_placements(text, mesh) for text in results)
    return NodeSharding(tuple(strategy), placements, tuple(origins))
