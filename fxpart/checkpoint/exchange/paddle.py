"""PaddlePaddle's converter dictionaries: sharding of a tensor over a mesh of processes.

``{"process_shape": [2, 2], "process_group": [0, 1, 2, 3], "dims_mapping": [0, -1]}``: the mesh has
2 x 2 processes, listed in row-major order by their ranks. Dim d of the tensor is sharded evenly
along mesh axis dims_mapping[d], or not at all for -1. The tensor is replicated along other axes
(PaddlePaddle 2.3 to 3, distributed/auto_parallel/static: converter.py merges and slices by these,
dist_saver.py writes one for each rank).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from fxpart.checkpoint.exchange.source import RankShard, make_foreign_file_error

_MOST = 1 << 16  # processes


class PaddleStrategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sharding of one tensor, with PaddlePaddle's field names."""

    process_shape: tuple[int, ...]
    process_group: tuple[int, ...]
    dims_mapping: tuple[int, ...]

    def fault(self, dims: int) -> str:
        """Return why no tensor with this number of dims can be sharded so, or ""."""
        shape, group, mapping = self.process_shape, self.process_group, self.dims_mapping
        valid = 0 < len(shape) <= 32 and all(0 < size <= _MOST for size in shape)
        if not valid or math.prod(shape) != len(group) or len(group) > _MOST:
            return f"process_group has {len(group)} ranks, process_shape is {list(shape)[:8]}"
        if len(set(group)) != len(group) or min(group) < 0:
            return "process_group has duplicate or negative ranks"
        if len(mapping) != dims:
            return f"dims_mapping is for {len(mapping)} dims, the tensor has {dims}"
        used = [axis for axis in mapping if axis != -1]
        if any(not 0 <= axis < len(shape) for axis in used) or len(set(used)) != len(used):
            return f"dims_mapping {list(mapping)} has duplicate or unknown mesh axes"
        return ""

    def count_shards(self) -> tuple[int, ...]:
        """Return the number of shards of each dim."""
        return tuple(1 if axis == -1 else self.process_shape[axis] for axis in self.dims_mapping)

    def make_shards(self, shape: tuple[int, ...]) -> list[RankShard]:
        """Return each process's shard, replicas included, in process_group order.

        FXP110 if a dim cannot be sharded evenly.
        """
        count_shards = self.count_shards()
        if any(size % count for size, count in zip(shape, count_shards, strict=True)):
            why = f"a tensor of {list(shape)} cannot be sharded evenly into {list(count_shards)}"
            raise make_foreign_file_error("dims_mapping", why, "use another strategy for it")
        found = []
        for rank, at in zip(self.process_group, self._iterate_coordinates(), strict=True):
            box = []
            for size, count, axis in zip(shape, count_shards, self.dims_mapping, strict=True):
                step = size // count
                start = 0 if axis == -1 else at[axis] * step
                box.append((start, start + step))
            found.append(RankShard(rank, tuple(box)))
        return found

    def find_first_replicas(self) -> list[int]:
        """Return ranks that together have every element once: the first of each set of replicas."""
        replicated = [
            axis for axis in range(len(self.process_shape)) if axis not in self.dims_mapping
        ]
        return [
            rank
            for rank, at in zip(self.process_group, self._iterate_coordinates(), strict=True)
            if not any(at[axis] for axis in replicated)
        ]

    def _iterate_coordinates(self) -> Iterator[tuple[int, ...]]:
        """Return each process's mesh coordinate."""
        return product(*map(range, self.process_shape))


def make_single_rank_strategy(rank: int, dims: int) -> PaddleStrategy:
    """Return the strategy of a tensor that is whole on one rank."""
    return PaddleStrategy((1,), (rank,), (-1,) * dims)


def strategy_of(shape: tuple[int, ...], shards: Sequence[RankShard]) -> PaddleStrategy | None:
    """Return the strategy of this layout; None if it is not an even grid over ranks."""
    if not shards or len({shard.rank for shard in shards}) != len(shards):
        return None
    ranges_by_dim = [sorted({shard.box[dim] for shard in shards}) for dim in range(len(shape))]
    if math.prod(map(len, ranges_by_dim)) != len(shards):
        return None
    for size, dim_ranges in zip(shape, ranges_by_dim, strict=True):
        step = size // len(dim_ranges)
        if (
            dim_ranges != [(i * step, (i + 1) * step) for i in range(len(dim_ranges))]
            or step * len(dim_ranges) < size
        ):
            return None
    ranks = {shard.box: shard.rank for shard in shards}
    if len(ranks) != len(shards):
        return None
    mapping: list[int] = []
    mesh: list[int] = []
    for dim_ranges in ranges_by_dim:
        mapping.append(len(mesh) if len(dim_ranges) > 1 else -1)
        mesh += [len(dim_ranges)] if len(dim_ranges) > 1 else []
    # Row-major over sharded dims, with the last one changing first, like sorted boxes.
    group = tuple(ranks[box] for box in sorted(ranks))
    return PaddleStrategy(tuple(mesh) or (1,), group, tuple(mapping))
