"""Map between whole tensors and the shards that each mesh rank stores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fxpart.program.spec import ProgramSpec, ShardingSpec
from fxpart.sharding import Mesh, Placements, Shard, chunk, indices, local_shape, parse_placements
from fxpart.sharding.mesh import parse_axes


@dataclass(frozen=True)
class ShardLayout:
    """Layout of a tensor of ``shape`` over the ranks of a mesh.

    flat: mesh axes ("dp", "dp,cp") along which each shard is flattened and divided again into equal
    pieces (ZeRO optimizer state). The local shape is then 1-d.
    """

    shape: tuple[int, ...]
    placements: Placements = ()
    mesh: Mesh = field(default_factory=Mesh)
    flat: str = ""

    @classmethod
    def of(cls, sharding: ShardingSpec | None, name: str, shape: tuple[int, ...]) -> ShardLayout:
        """Return the layout of a parameter or buffer; ``shape`` is used if there is no mesh."""
        if sharding is None:
            return cls(shape)
        mesh = Mesh.parse(sharding.mesh)
        stored = sharding.state.get(name)
        if stored is None:
            return cls(shape, (None,) * len(mesh.axes), mesh)
        return cls(stored.shape, parse_placements(stored.placements, mesh), mesh)

    @property
    def is_cut(self) -> bool:
        """Whether a mesh rank stores less than the whole tensor."""
        return bool(self.axes or self.flat)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the tensor is sharded."""
        names = zip(self.mesh.names, self.placements, strict=True)
        return frozenset(name for name, placement in names if isinstance(placement, Shard))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The mesh ranks that together store every element once: the first of each group of
        replicas."""
        cut = self.axes | {*parse_axes(self.flat)}
        return tuple(
            mesh_rank
            for mesh_rank in range(self.mesh.size)
            if all(
                place == 0 or name in cut
                for name, place in zip(
                    self.mesh.names, self.mesh.coordinate(mesh_rank), strict=True
                )
            )
        )

    @cached_property
    def most(self) -> int:
        """The number of elements of the largest shard."""
        mesh_ranks = range(self.mesh.size) if self.is_cut else range(1)
        return max(math.prod(self.local_shape(mesh_rank)) for mesh_rank in mesh_ranks)

    def local_shape(self, mesh_rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of a mesh rank."""
        shape = local_shape(self.shape, self.placements, self.mesh, mesh_rank)
        if not self.flat:
            return shape
        start, stop = self.range(mesh_rank, math.prod(shape))
        return (stop - start,)

    def range(self, mesh_rank: int, size: int) -> tuple[int, int]:
        """Return start and stop of a mesh rank's piece of ``size`` elements on the ``flat``
        axes, of which the first of the mesh is major."""
        names, place = parse_axes(self.flat), 0
        for (name, length), at in zip(self.mesh.axes, self.mesh.coordinate(mesh_rank), strict=True):
            place = place * length + at if name in names else place
        return chunk(size, self.mesh.count(*names), place)

    def of_state(self, shape: Sequence[int]) -> ShardLayout | None:
        """Return the layout of an optimizer's state of a whole shape; None if it has no parts.

        It is divided as the tensor is if it has the tensor's shape, or dims of 1 instead of dims
        that are not sharded, such as one number per row.
        """
        if tuple(shape) == self.shape:
            return self
        if self.flat or len(shape) != len(self.shape):
            return None
        cut = {p.dim for p in self.placements if isinstance(p, Shard)}
        for dim, (size, own) in enumerate(zip(shape, self.shape, strict=True)):
            if size != own and (size != 1 or dim in cut):
                return None
        return replace(self, shape=tuple(shape))

    def of_local_state(self, shape: Sequence[int], local: Sequence[int]) -> ShardLayout | None:
        """Return :meth:`of_state` for a mesh rank's part of the state. local: its shard's shape."""
        if tuple(shape) == tuple(local):
            return self
        if len(shape) != len(self.shape) or len(local) != len(self.shape):
            return None
        pairs = zip(shape, local, self.shape, strict=True)
        return self.of_state([whole if size == own else size for size, own, whole in pairs])

    def part(self, whole: torch.Tensor, mesh_rank: int) -> torch.Tensor:
        """Return the shard of a mesh rank; a view if its elements are one range of each dim."""
        for dim, start, stop, picked in self._cuts(mesh_rank):
            if picked is None:
                whole = whole.narrow(dim, start, stop - start)
            else:
                whole = whole.index_select(dim, picked.to(whole.device))
        if self.flat:
            whole = whole.reshape(-1)
            whole = whole[slice(*self.range(mesh_rank, whole.numel()))]
        return whole

    def put(self, whole: torch.Tensor, mesh_rank: int, part: torch.Tensor) -> None:
        """Write the shard of a mesh rank into the whole tensor."""
        if not self.flat:
            self._put(whole, mesh_rank, part)
            return
        inner = ShardLayout(self.shape, self.placements, self.mesh)
        mine = inner.part(whole, mesh_rank).reshape(-1).clone()
        mine[slice(*self.range(mesh_rank, mine.numel()))] = part
        self._put(whole, mesh_rank, mine.view(inner.local_shape(mesh_rank)))

    def _put(self, whole: torch.Tensor, mesh_rank: int, part: torch.Tensor) -> None:
        """Copy a shard; dims that are divided into several ranges are indexed."""
        spread: list[tuple[int, torch.Tensor]] = []
        for dim, start, stop, picked in self._cuts(mesh_rank):
            if picked is None:
                whole = whole.narrow(dim, start, stop - start)
            else:
                spread.append((dim, picked.to(whole.device)))
        if not spread:
            whole.copy_(part)
        elif len(spread) == 1:
            whole.index_copy_(*spread[0], part.to(whole.device, whole.dtype))
        else:
            lines = [torch.arange(size, device=whole.device) for size in whole.shape]
            for dim, picked in spread:
                lines[dim] = picked
            grid = torch.meshgrid(*lines, indexing="ij")
            whole[grid] = part.to(whole.device, whole.dtype)

    def slices(self, mesh_rank: int) -> tuple[slice, ...] | None:
        """Return the shard as one range of each dim; None if a dim has several ranges."""
        found = [slice(0, size) for size in self.shape]
        for dim, start, stop, picked in self._cuts(mesh_rank):
            if picked is not None:
                return None
            found[dim] = slice(start, stop)
        return tuple(found)

    def _cuts(self, mesh_rank: int) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
        """Yield each sharded dim with its range, and its indices if they are not one range."""
        cut = sorted({p.dim for p in self.placements if isinstance(p, Shard)})
        if not cut:
            return
        picked = indices(self.shape, self.placements, self.mesh, mesh_rank)
        for dim in cut:
            mine = picked[dim]
            start = int(mine[0]) if len(mine) else 0
            stop = start + len(mine)
            one = not len(mine) or int(mine[-1]) == stop - 1
            yield dim, start, stop, None if one else torch.from_numpy(mine)


@dataclass(frozen=True)
class StateSlicer:
    """Takes the shards of a mesh rank out of whole tensors, by tensor name."""

    sharding: ShardingSpec
    mesh_rank: int

    def __call__(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the shard; a view if its elements are one range of each dim."""
        return ShardLayout.of(self.sharding, name, tuple(whole.shape)).part(whole, self.mesh_rank)

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return the shard as one range of each dim; None if a dim has several ranges."""
        return ShardLayout.of(self.sharding, name, shape).slices(self.mesh_rank)


def make_state_slicer(spec: ProgramSpec, mesh_rank: int) -> StateSlicer | None:
    """Return a slicer for the shards of a mesh rank; None if each stage has one rank."""
    return None if spec.sharding is None else StateSlicer(spec.sharding, mesh_rank)
