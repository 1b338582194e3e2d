"""Meshes, placements and layouts: which part of a tensor each mesh rank stores.

This package does not import torch, because plans and programs contain these as text.
"""

from __future__ import annotations

from fxpart.sharding.layout import chunk, indices, local_shape
from fxpart.sharding.mesh import Mesh
from fxpart.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    count_dim_parts,
    count_dim_ranks,
    format_placements,
    parse_placements,
)

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Mesh",
    "Partial",
    "Placement",
    "Placements",
    "Replicate",
    "Shard",
    "chunk",
    "count_dim_parts",
    "count_dim_ranks",
    "format_placements",
    "indices",
    "local_shape",
    "parse_placements",
]
