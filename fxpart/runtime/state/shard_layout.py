"""Whole tensors and what each lane holds of them: parts taken out, parts put in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fxpart.program.spec import ProgramSpec, ShardingSpec
from fxpart.sharding import Mesh, Placements, Shard, chunk, indices, local_shape, parse_placements


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor of ``shape`` lies over the lanes of a mesh.

    flat: the axis along which what a lane holds is cut once more, as a flat tensor in equal pieces
    (state of an optimizer that is sharded over the axis); the shape is then 1-d.
    """

    shape: tuple[int, ...]
    placements: Placements = ()
    mesh: Mesh = field(default_factory=Mesh)
    flat: str = ""

    @classmethod
    def of(cls, sharding: ShardingSpec | None, name: str, shape: tuple[int, ...]) -> ShardLayout:
        """Those of a parameter or buffer; ``shape`` is that of a program without a mesh."""
        if sharding is None:
            return cls(shape)
        mesh = Mesh.parse(sharding.mesh)
        held = sharding.state.get(name)
        if held is None:
            return cls(shape, (None,) * len(mesh.axes), mesh)
        return cls(held.shape, parse_placements(held.placements, mesh), mesh)

    @property
    def is_cut(self) -> bool:
        """Whether a lane holds less than the whole."""
        return bool(self.axes or self.flat)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which the tensor is cut."""
        names = zip(self.mesh.names, self.placements, strict=True)
        return frozenset(name for name, placement in names if isinstance(placement, Shard))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The lanes that together hold every element once: the first of each group of equals."""
        cut = self.axes | {self.flat}
        return tuple(
            lane
            for lane in range(self.mesh.size)
            if all(
                place == 0 or name in cut
                for name, place in zip(self.mesh.names, self.mesh.coordinate(lane), strict=True)
            )
        )

    @cached_property
    def most(self) -> int:
        """The elements of the lane that holds the most."""
        lanes = range(self.mesh.size) if self.is_cut else range(1)
        return max(math.prod(self.local_shape(lane)) for lane in lanes)

    def local_shape(self, lane: int) -> tuple[int, ...]:
        """The shape of what the lane holds."""
        shape = local_shape(self.shape, self.placements, self.mesh, lane)
        if not self.flat:
            return shape
        start, stop = self.range(lane, math.prod(shape))
        return (stop - start,)

    def range(self, lane: int, size: int) -> tuple[int, int]:
        """Start and stop of the lane's piece of ``size`` elements along the ``flat`` axis."""
        at = self.mesh.index(self.flat)
        return chunk(size, self.mesh.shape[at], self.mesh.coordinate(lane)[at])

    def part(self, whole: torch.Tensor, lane: int) -> torch.Tensor:
        """What the lane holds of the whole tensor; a view where its elements lie in one range."""
        for dim, start, stop, picked in self._cuts(lane):
            if picked is None:
                whole = whole.narrow(dim, start, stop - start)
            else:
                whole = whole.index_select(dim, picked.to(whole.device))
        if self.flat:
            whole = whole.reshape(-1)
            whole = whole[slice(*self.range(lane, whole.numel()))]
        return whole

    def put(self, whole: torch.Tensor, lane: int, part: torch.Tensor) -> None:
        """Write the lane's part into the whole tensor."""
        if not self.flat:
            self._put(whole, lane, part)
            return
        inner = ShardLayout(self.shape, self.placements, self.mesh)
        mine = inner.part(whole, lane).reshape(-1).clone()
        mine[slice(*self.range(lane, mine.numel()))] = part
        self._put(whole, lane, mine.view(inner.local_shape(lane)))

    def _put(self, whole: torch.Tensor, lane: int, part: torch.Tensor) -> None:
        """Views down to the last dim that is cut into several ranges; that one by its indices."""
        spread: list[tuple[int, torch.Tensor]] = []
        for dim, start, stop, picked in self._cuts(lane):
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

    def slices(self, lane: int) -> tuple[slice, ...] | None:
        """The lane's part as one range of each dim; None where a dim is cut into several."""
        found = [slice(0, size) for size in self.shape]
        for dim, start, stop, picked in self._cuts(lane):
            if picked is not None:
                return None
            found[dim] = slice(start, stop)
        return tuple(found)

    def _cuts(self, lane: int) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
        """Per dim that is cut: the range held, or the indices where it is not one range."""
        cut = sorted({p.dim for p in self.placements if isinstance(p, Shard)})
        if not cut:
            return
        held = indices(self.shape, self.placements, self.mesh, lane)
        for dim in cut:
            mine = held[dim]
            start = int(mine[0]) if len(mine) else 0
            stop = start + len(mine)
            one = not len(mine) or int(mine[-1]) == stop - 1
            yield dim, start, stop, None if one else torch.from_numpy(mine)


@dataclass(frozen=True)
class StateSlicer:
    """A lane's parts of whole tensors, by name."""

    sharding: ShardingSpec
    lane: int

    def __call__(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The part; a view where its elements lie in one range."""
        return ShardLayout.of(self.sharding, name, tuple(whole.shape)).part(whole, self.lane)

    def slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """The part as one range of each dim, None where a dim is cut into several."""
        return ShardLayout.of(self.sharding, name, shape).slices(self.lane)


def make_state_slicer(spec: ProgramSpec, lane: int) -> StateSlicer | None:
    """What takes a lane's part out of whole tensors by name; None where a stage is one rank."""
    return None if spec.sharding is None else StateSlicer(spec.sharding, lane)
