"""Tensors as a checkpoint has them: the bytes of the part that a lane holds, and where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fxpart.checkpoint.manifest import Ranges
from fxpart.checkpoint.regions import Bytes, TensorRegion, make_full_region
from fxpart.program.edges import torch_dtype
from fxpart.program.shard_layout import ShardLayout
from fxpart.runtime.state.model_state import StateEntry
from fxpart.sharding import Shard, indices


def region_of(pieces: ShardLayout, lane: int) -> TensorRegion:
    """What the lane holds of the whole tensor."""
    cut = {p.dim for p in pieces.placements if isinstance(p, Shard)}
    if not cut and not pieces.flat:
        return make_full_region(pieces.shape)
    held = indices(pieces.shape, pieces.placements, pieces.mesh, lane) if cut else ()
    ranges = tuple(
        _ranges(held[dim]) if dim in cut else ((0, size),) for dim, size in enumerate(pieces.shape)
    )
    box = TensorRegion(ranges)
    return TensorRegion(ranges, pieces.range(lane, box.elements)) if pieces.flat else box


def key_of(name: str, entry: StateEntry) -> str:
    """Under which a checkpoint has a parameter or buffer; "" for a constant, which it has not."""
    spec = entry.spec
    if spec.kind == "constant":
        return ""
    saved = spec.kind == "parameter" or spec.persistent
    return f"model/{name}" if saved else f"buffer/{name}"


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor of the CPU, 1-d: a view."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return view


def as_tensor(data: Bytes, dtype: str) -> torch.Tensor:
    """The tensor of bytes that were read, [*shape, bytes of an element]: a view."""
    if not data.size:
        return torch.empty(data.shape[:-1], dtype=torch_dtype(dtype))
    return torch.from_numpy(data).view(torch_dtype(dtype)).squeeze(-1)


def dtype_name(tensor: torch.Tensor) -> str:
    """As torch names it: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _ranges(held: Any) -> Ranges:
    """Ascending indices as ranges."""
    if not len(held):
        return ()
    breaks = np.flatnonzero(np.diff(held) != 1)
    starts = [int(held[0]), *(int(held[at + 1]) for at in breaks)]
    stops = [*(int(held[at]) + 1 for at in breaks), int(held[-1]) + 1]
    return tuple(zip(starts, stops, strict=True))
