"""PaddlePaddle's converter dictionaries: how a tensor is cut over a mesh of processes.

``{"process_shape": [2, 2], "process_group": [0, 1, 2, 3], "dims_mapping": [0, -1]}``: the mesh has
2 x 2 processes, given in row-major order by their ranks; dim d of the tensor is cut into equal
parts along the mesh's axis dims_mapping[d], and not at all where that is -1. Along an axis that no
dim names, processes hold the same (PaddlePaddle 2.3 to 3, distributed/auto_parallel/static:
converter.py merges and slices by these, dist_saver.py writes one for each rank).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from fxpart.checkpoint.exchange.source import RankShard, make_foreign_file_error

_MOST = 1 << 16  # processes


class PaddleStrategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one tensor is cut; the fields are PaddlePaddle's own."""

    process_shape: tuple[int, ...]
    process_group: tuple[int, ...]
    dims_mapping: tuple[int, ...]

    def fault(self, dims: int) -> str:
        """Why no tensor of so many dims can be cut so; "" where it can."""
        shape, group, mapping = self.process_shape, self.process_group, self.dims_mapping
        sound = 0 < len(shape) <= 32 and all(0 < size <= _MOST for size in shape)
        if not sound or math.prod(shape) != len(group) or len(group) > _MOST:
            return f"process_group has {len(group)} ranks, process_shape is {list(shape)[:8]}"
        if len(set(group)) != len(group) or min(group) < 0:
            return "process_group names a rank twice, or none"
        if len(mapping) != dims:
            return f"dims_mapping is for {len(mapping)} dims, the tensor has {dims}"
        used = [axis for axis in mapping if axis != -1]
        if any(not 0 <= axis < len(shape) for axis in used) or len(set(used)) != len(used):
            return f"dims_mapping {list(mapping)} names an axis twice, or none of the mesh"
        return ""

    def cuts(self) -> tuple[int, ...]:
        """Into how many parts each dim is cut."""
        return tuple(1 if axis == -1 else self.process_shape[axis] for axis in self.dims_mapping)

    def boxes(self, shape: tuple[int, ...]) -> list[RankShard]:
        """What each process holds of a tensor, copies too, in the order of process_group.

        FXP110 where a dim cannot be cut into equal parts.
        """
        cuts = self.cuts()
        if any(size % count for size, count in zip(shape, cuts, strict=True)):
            why = f"a tensor of {list(shape)} cannot be cut into {list(cuts)} equal parts"
            raise make_foreign_file_error("dims_mapping", why, "another strategy for it")
        found = []
        for rank, at in zip(self.process_group, self._places(), strict=True):
            box = []
            for size, count, axis in zip(shape, cuts, self.dims_mapping, strict=True):
                step = size // count
                start = 0 if axis == -1 else at[axis] * step
                box.append((start, start + step))
            found.append(RankShard(rank, tuple(box)))
        return found

    def holders(self) -> list[int]:
        """The ranks that together hold every number once: the first of each that hold the same."""
        free = [axis for axis in range(len(self.process_shape)) if axis not in self.dims_mapping]
        return [
            rank
            for rank, at in zip(self.process_group, self._places(), strict=True)
            if not any(at[axis] for axis in free)
        ]

    def _places(self) -> Iterator[tuple[int, ...]]:
        """Where each process stands in the mesh."""
        return product(*map(range, self.process_shape))


def make_single_rank_strategy(rank: int, dims: int) -> PaddleStrategy:
    """A tensor that is whole on one rank."""
    return PaddleStrategy((1,), (rank,), (-1,) * dims)


def strategy_of(shape: tuple[int, ...], held: Sequence[RankShard]) -> PaddleStrategy | None:
    """The strategy by which parts lie as they do; None where they are no even grid over ranks."""
    if not held or len({each.rank for each in held}) != len(held):
        return None
    lines = [sorted({each.box[dim] for each in held}) for dim in range(len(shape))]
    if math.prod(map(len, lines)) != len(held):
        return None
    for size, line in zip(shape, lines, strict=True):
        step = size // len(line)
        if (
            line != [(i * step, (i + 1) * step) for i in range(len(line))]
            or step * len(line) < size
        ):
            return None
    ranks = {each.box: each.rank for each in held}
    if len(ranks) != len(held):
        return None
    mapping: list[int] = []
    mesh: list[int] = []
    for line in lines:
        mapping.append(len(mesh) if len(line) > 1 else -1)
        mesh += [len(line)] if len(line) > 1 else []
    # Row-major over the dims that are cut: the last one changes first, as sorted boxes do.
    group = tuple(ranks[box] for box in sorted(ranks))
    return PaddleStrategy(tuple(mesh) or (1,), group, tuple(mapping))
