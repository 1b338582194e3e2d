"""Conversion of tensors to checkpoint bytes, and the region that a mesh rank stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fxpart.checkpoint.manifest import Ranges
from fxpart.checkpoint.regions import Bytes, TensorRegion, make_full_region
from fxpart.runtime.dtypes import torch_dtype
from fxpart.runtime.state.model_state import StateEntry
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.sharding import Shard, indices


def region_of(pieces: ShardLayout, mesh_rank: int) -> TensorRegion:
    """Return the region of the whole tensor that a mesh rank stores."""
    sharded = {p.dim for p in pieces.placements if isinstance(p, Shard)}
    if not sharded and not pieces.flat:
        return make_full_region(pieces.shape)
    stored = indices(pieces.shape, pieces.placements, pieces.mesh, mesh_rank) if sharded else ()
    ranges = tuple(
        _ranges(stored[dim]) if dim in sharded else ((0, size),)
        for dim, size in enumerate(pieces.shape)
    )
    box = TensorRegion(ranges)
    return TensorRegion(ranges, pieces.range(mesh_rank, box.elements)) if pieces.flat else box


def key_of(name: str, entry: StateEntry) -> str:
    """Return the checkpoint key of a parameter or buffer; "" for a constant, which is not saved."""
    spec = entry.spec
    if spec.kind == "constant":
        return ""
    saved = spec.kind == "parameter" or spec.persistent
    return f"model/{name}" if saved else f"buffer/{name}"


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """View a contiguous CPU tensor as 1-d bytes."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def as_tensor(data: Bytes, dtype: str) -> torch.Tensor:
    """View bytes [*shape, bytes of an element] as a tensor."""
    if not data.size:
        return torch.empty(data.shape[:-1], dtype=torch_dtype(dtype))
    return torch.from_numpy(data).view(torch_dtype(dtype)).squeeze(-1)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of the dtype, "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _ranges(stored: Any) -> Ranges:
    """Convert ascending indices to ranges."""
    if not len(stored):
        return ()
    breaks = np.flatnonzero(np.diff(stored) != 1)
    starts = [int(stored[0]), *(int(stored[at + 1]) for at in breaks)]
    stops = [*(int(stored[at]) + 1 for at in breaks), int(stored[-1]) + 1]
    return tuple(zip(starts, stops, strict=True))
