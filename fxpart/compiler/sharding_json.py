"""JSON form of the mesh and the shardings of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpart.compiler.node_annotation import (
    MESH_KEY,
    MESH_RANK_KEY,
    OUTPUTS_KEY,
    PARTIAL_KEY,
    NodeSharding,
)
from fxpart.sharding import Mesh, format_placements, parse_placements

Json = Any


def mesh_to_json(module: fx.GraphModule) -> dict[str, Json]:
    """Return mesh, mesh rank and metadata of a rank-local graph; an empty dict without a mesh."""
    mesh = module.meta.get(MESH_KEY)
    if mesh is None:
        return {}
    result: dict[str, Json] = {"mesh": str(mesh)}
    if MESH_RANK_KEY in module.meta:
        result["lane"] = module.meta[MESH_RANK_KEY]
        result["partial"] = {n: list(axes) for n, axes in module.meta[PARTIAL_KEY].items()}
        result["outputs"] = [
            None if placements is None else format_placements(placements, mesh)
            for placements in module.meta[OUTPUTS_KEY]
        ]
    return result


def mesh_from_json(data: Mapping[str, Json], module: fx.GraphModule) -> None:
    """Set the metadata that :func:`mesh_to_json` wrote."""
    if "mesh" not in data:
        return
    mesh = module.meta[MESH_KEY] = Mesh.parse(data["mesh"])
    if "lane" in data:
        module.meta[MESH_RANK_KEY] = data["lane"]
        module.meta[PARTIAL_KEY] = {n: tuple(axes) for n, axes in data["partial"].items()}
        module.meta[OUTPUTS_KEY] = tuple(
            None if item is None else parse_placements(item, mesh) for item in data["outputs"]
        )


def sharding_to_json(known: NodeSharding, mesh: Mesh) -> Json:
    """Return a node's sharding as JSON."""
    return [
        list(known.strategy),
        [format_placements(placements, mesh) for placements in known.results],
        list(known.origins),
    ]


def sharding_from_json(held: Json, mesh: Mesh) -> NodeSharding:
    """Return the sharding that :func:`sharding_to_json` wrote."""
    strategy, results, origins = held
    placements = tuple(parse_placements(text, mesh) for text in results)
    return NodeSharding(tuple(strategy), placements, tuple(origins))
