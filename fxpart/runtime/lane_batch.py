"""A lane's part of each microbatch of the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fxpart.errors import FxpartError, Problem
from fxpart.program import InputSpec, ProgramSpec
from fxpart.runtime.batch import Cut, Reader
from fxpart.runtime.lanes import Lane, mesh_of
from fxpart.runtime.pieces import Pieces
from fxpart.sharding import Mesh, Placements, Shard, parse_placements


class LaneFeed:
    """Reads the global batch, and gives each lane of this process its part."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        """lanes: those of this process."""
        self._spec = lanes[0].spec
        self._reader = Reader(self._spec, row_multiple(self._spec))
        self._parts = [LaneReader(lane.spec, lane.index) for lane in lanes]

    def read(self, batch: Any, microbatches: int) -> Cut:
        """The global batch in microbatches; FXP105 with every fault."""
        cut = self._reader.read(batch, microbatches)
        problems = uneven_dims(self._spec, cut)
        if problems:
            raise FxpartError(problems)
        return cut

    def parts(self, cut: Cut) -> list[Cut]:
        """Each lane's part."""
        return [part.read(cut) for part in self._parts]


class LaneReader:
    """Takes one lane's part out of batches that were read whole."""

    def __init__(self, spec: ProgramSpec, lane: int) -> None:
        """spec: any lane's program."""
        self._lane = lane
        self._whole = spec.sharding is None
        self._symbols = spec.symbols
        self._mesh = mesh_of(spec)
        self._placements = input_placements(spec)
        self._known: dict[tuple[str, tuple[int, ...]], Pieces] = {}

    def read(self, cut: Cut) -> Cut:
        """The same microbatches, with the lane's parts and their sizes as symbols."""
        if self._whole:
            return cut
        inputs = tuple(
            {name: self._pieces(name, t.shape).part(t, self._lane) for name, t in piece.items()}
            for piece in cut.inputs
        )
        sizes = tuple(
            {symbol: piece[name].shape[dim] for symbol, (name, dim) in self._symbols.items()}
            for piece in inputs
        )
        return Cut(inputs, sizes, cut.rows, cut.weights)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Pieces:
        key = (name, tuple(shape))
        if key not in self._known:
            self._known[key] = Pieces(key[1], self._placements[name], self._mesh)
        return self._known[key]


def input_placements(spec: ProgramSpec) -> dict[str, Placements]:
    """How each input lies over the lanes."""
    if spec.sharding is None:
        return {i.name: () for i in spec.inputs}
    mesh, given = mesh_of(spec), spec.sharding.placements
    return {i.name: parse_placements(given.get(i.name, ""), mesh) for i in spec.sharding.inputs}


def row_multiple(spec: ProgramSpec) -> int:
    """What the rows of each microbatch must be a multiple of: the data-parallel degree."""
    if spec.sharding is None:
        return 1
    mesh, placements = mesh_of(spec), input_placements(spec)
    found = (
        parts_of(mesh, placements[i.name], i.batch_dim)
        for i in spec.sharding.inputs
        if i.batch_dim is not None
    )
    return math.lcm(*found)


def parts_of(mesh: Mesh, placements: Placements, dim: int) -> int:
    """Into how many equal parts a dim is cut."""
    parts, outer = 1, 1
    for placement, size in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            parts, outer = parts * size, max(outer, placement.outer)
    return parts * outer


def uneven_dims(spec: ProgramSpec, cut: Cut) -> list[Problem]:
    """Problems with inputs whose symbolic dims do not fall into equal parts."""
    if spec.sharding is None:
        return []
    mesh, placements = mesh_of(spec), input_placements(spec)
    found: dict[Problem, None] = {}
    for given in spec.sharding.inputs:
        for dim, entry in enumerate(given.shape):
            parts = parts_of(mesh, placements[given.name], dim)
            if isinstance(entry, int) or parts == 1:
                continue
            for piece in cut.inputs:
                size = piece[given.name].shape[dim]
                if size % parts:
                    found[_uneven(given, dim, size, parts, spec.sharding.mesh)] = None
    return list(found)


def _uneven(given: InputSpec, dim: int, size: int, parts: int, mesh: str) -> Problem:
    return Problem(
        "FXP105",
        "batch" + "".join(f"[{key!r}]" for key in given.path),
        f"dim {dim} is {size}, and the mesh {mesh} cuts it into {parts} equal parts",
        f"give a multiple of {parts}",
    )
