"""A lane's part of each microbatch of the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem, error
from fxpart.program.shard_layout import ShardLayout
from fxpart.program.spec import InputSpec, ProgramSpec
from fxpart.runtime.batch.batch_reader import BatchReader, LocalBatch, MicrobatchSplit, Shape
from fxpart.runtime.batch.batch_totals import BatchTotals
from fxpart.runtime.batch.row_repetition import repeat_rows
from fxpart.runtime.batch.symbolic_shapes import find_symbol_sources
from fxpart.runtime.mesh.mesh_ranks import MeshRank, get_stage_mesh
from fxpart.sharding import Mesh, Placements, Shard, parse_placements

_ROUNDING = 1e-6  # of a divisor that is kept away from zero by a small number


class GlobalBatchReader:
    """Reads the global batch, and gives each lane of this process its part."""

    def __init__(
        self, lanes: Sequence[MeshRank], constants: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """lanes: those of this process. constants: of totals, as for :class:`BatchTotals`."""
        self._spec = lanes[0].spec
        self.needed = find_needed_inputs(lanes)
        self._reader = BatchReader(self._spec, get_row_multiple(self._spec), self.needed, constants)
        weight = self._spec.weight
        self._weight = (
            None if weight is None else BatchTotals(weight, self._spec.symbols, constants)
        )
        self._parts = [BatchSlicer(lane.spec, lane.index) for lane in lanes]

    def read(self, batch: Any, microbatches: int) -> MicrobatchSplit:
        """The global batch in microbatches; FXP105 with every fault."""
        return self.cut(self.look(batch), microbatches)

    def look(self, batch: Any, *, local: bool = False) -> LocalBatch:
        """What the batch holds; FXP105. local: it has only the rows of this process's lanes."""
        seen = self._reader.look(batch)
        if not local:
            return seen
        self._check_local()
        parts = count_row_parts(self._spec)
        if len({part.place for part in self._parts}) > 1:
            raise error(
                "FXP109",
                where="local=True",
                why="this process runs several lanes, which do not have the same rows",
                fix="give the global batch",
            )
        whole = {}
        for given in get_global_inputs(self._spec):
            if given.name in seen.shapes:
                dtype, shape = seen.shapes[given.name]
                sizes = [
                    n * parts[given.name] if at == given.batch_dim else n
                    for at, n in enumerate(shape)
                ]
                whole[given.name] = (dtype, tuple(sizes))
        return LocalBatch(seen.tensors, whole, seen.absent, local=True)

    @property
    def weighs(self) -> bool:
        """Whether a batch has a weight of its own in a mean over batches, besides its rows."""
        return self._weight is not None

    def weight(self, seen: LocalBatch) -> float | None:
        """The number that the batch's loss is divided by; None where this process cannot know it.

        FXP109 for rows of this process's lanes only.
        """
        assert self._weight is not None, "asked of programs whose batches are weighed"
        if seen.local and get_row_multiple(self._spec) > 1:
            raise error(
                "FXP109",
                where="local=True",
                why="accumulated batches are weighted by a number of the whole batch, such as its "
                "valid tokens",
                fix="give the global batch, or do not accumulate",
            )
        found = self._weight.of(seen.tensors)
        return float(next(iter(found.values()))) if found else None

    def may_repeat(self, seen: LocalBatch, microbatches: int, count: int) -> bool:
        """Whether results are the same where each row is there so many times.

        Of a loss that is divided by a number of the batch, the number has to change as rows do.
        Ranks that cannot know it leave that to those that do.
        """
        kind = self._spec.repeat[microbatches > 1]
        if kind != "divisor" or self._weight is None or seen.local:
            return kind == "rows"
        repeated = dict(seen.tensors)
        for given in get_global_inputs(self._spec):
            if given.batch_dim is not None and given.name in seen.tensors:
                tensor = seen.tensors[given.name]
                repeated[given.name] = repeat_rows(tensor, count, given.batch_dim)
        once, again = self._weight.of(seen.tensors), self._weight.of(repeated)
        if not once:
            return True
        *_, before = once.values()
        *_, after = again.values()
        wanted = count * float(before)
        return abs(float(after) - wanted) <= _ROUNDING * abs(wanted)

    def _check_local(self) -> None:
        """FXP109 where the loss needs a number of all rows, and a rank would have some of them."""
        if self._spec.totals is not None and get_row_multiple(self._spec) > 1:
            raise error(
                "FXP109",
                where="local=True",
                why="the loss is divided by a number of the whole batch, such as its valid tokens",
                fix="give the global batch, or compile with microbatches=1",
            )

    def cut(
        self,
        seen: LocalBatch,
        microbatches: int,
        others: Mapping[str, Shape] | None = None,
    ) -> MicrobatchSplit:
        """The global batch in microbatches; see
        :meth:`fxpart.runtime.batch.batch_reader.BatchReader.cut`.
        """
        cut = self._reader.cut(seen, microbatches, others)
        problems = find_uneven_dims(self._spec, cut)
        if problems:
            raise FxpartError(problems)
        return cut

    @property
    def multiple(self) -> int:
        """What the rows of each microbatch are a multiple of, or are repeated to be."""
        return get_row_multiple(self._spec)

    @property
    def row_axes(self) -> frozenset[str]:
        """The mesh axes over which ranks share the rows of any input."""
        mesh, held = get_stage_mesh(self._spec), get_input_placements(self._spec)
        return frozenset(
            axis
            for given in get_global_inputs(self._spec)
            for axis, placement in zip(mesh.names, held[given.name], strict=False)
            if isinstance(placement, Shard) and placement.dim == given.batch_dim
        )

    def parts(self, cut: MicrobatchSplit) -> list[MicrobatchSplit]:
        """Each lane's part."""
        return [part.read(cut) for part in self._parts]


class BatchSlicer:
    """Takes one lane's part out of batches that were read whole."""

    def __init__(self, spec: ProgramSpec, lane: int) -> None:
        """spec: any lane's program."""
        self._lane = lane
        self._whole = spec.sharding is None
        self._symbols, self._inputs = spec.symbols, spec.inputs
        self._mesh = get_stage_mesh(spec)
        self._dims = {given.name: given.batch_dim for given in get_global_inputs(spec)}
        self._placements = get_input_placements(spec)
        self._across = {
            name: tuple(
                None if isinstance(p, Shard) and p.dim == self._dims[name] else p for p in held
            )
            for name, held in self._placements.items()
        }
        self._known: dict[tuple[str, tuple[int, ...], bool], ShardLayout] = {}

    @property
    def place(self) -> tuple[int, ...]:
        """Where the lane stands along the axes that cut the rows of any input."""
        at = self._mesh.coordinate(self._lane)
        return tuple(
            at[axis]
            for axis in range(len(at))
            if any(self._placements[n][axis] != self._across[n][axis] for n in self._dims)
        )

    def rows(self, name: str, count: int) -> torch.Tensor:
        """Which of ``count`` rows of an input are the lane's."""
        held = tuple(
            p and Shard(0, outer=p.outer) if isinstance(p, Shard) and p != q else None
            for p, q in zip(self._placements[name], self._across[name], strict=True)
        )
        return ShardLayout((count,), held, self._mesh).part(torch.arange(count), self._lane)

    def read(self, cut: MicrobatchSplit) -> MicrobatchSplit:
        """The same microbatches, with the lane's parts and their sizes as symbols."""
        if self._whole:
            return cut if cut.local is None else replace(cut, inputs=self._own(cut, cut.inputs))
        inputs = tuple(
            {
                name: self._pieces(name, t.shape).part(t, self._lane) if name in self._dims else t
                for name, t in piece.items()
            }
            for piece in cut.inputs
        )
        read = find_symbol_sources(self._symbols, self._inputs, inputs[0])
        sizes = tuple(
            {symbol: piece[name].shape[dim] for symbol, (name, dim) in read.items()}
            for piece in inputs
        )
        inputs = inputs if cut.local is None else self._own(cut, inputs)
        return MicrobatchSplit(inputs, sizes, cut.rows, cut.weights, cut.repeats, totals=cut.totals)

    def _own(
        self, cut: MicrobatchSplit, shapes: Sequence[dict[str, torch.Tensor]]
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """The pieces of a batch that has this lane's rows only, of the shapes of ``shapes``."""
        assert cut.local is not None
        found = [dict(piece) for piece in shapes]
        for name, tensor in cut.local.items():
            dim = self._dims[name]
            if dim is None:
                parts: Sequence[torch.Tensor] = [tensor] * len(found)
            else:
                parts = torch.split(tensor, [piece[name].shape[dim] for piece in shapes], dim)
            for piece, part in zip(found, parts, strict=True):
                piece[name] = self._pieces(name, part.shape, across=True).part(part, self._lane)
        return tuple(found)

    def _pieces(self, name: str, shape: tuple[int, ...], *, across: bool = False) -> ShardLayout:
        """across: the rows are the lane's already."""
        key = (name, tuple(shape), across)
        if key not in self._known:
            held = (self._across if across else self._placements)[name]
            self._known[key] = ShardLayout(key[1], held, self._mesh)
        return self._known[key]


def find_needed_inputs(lanes: Sequence[MeshRank]) -> frozenset[str]:
    """The inputs that the stages of this process take."""
    taken = {
        value.name
        for lane in lanes
        for stage in lane.spec.stages
        if stage.index in lane.modules
        for value, source in zip(stage.inputs, stage.sources, strict=True)
        if source < 0
    }
    totals = lanes[0].spec.totals
    if totals is not None and taken & set(totals.names):
        taken |= set(totals.inputs)
    return frozenset(taken & {given.name for given in get_global_inputs(lanes[0].spec)})


def get_global_inputs(spec: ProgramSpec) -> tuple[InputSpec, ...]:
    """The user's tensors as the user gives them, whole."""
    return spec.inputs if spec.sharding is None else spec.sharding.inputs


def count_row_parts(spec: ProgramSpec) -> dict[str, int]:
    """Into how many equal parts the rows of each input are cut."""
    mesh, held = get_stage_mesh(spec), get_input_placements(spec)
    return {
        given.name: 1
        if given.batch_dim is None
        else count_dim_parts(mesh, held[given.name], given.batch_dim)
        for given in get_global_inputs(spec)
    }


def get_input_placements(spec: ProgramSpec) -> dict[str, Placements]:
    """How each input lies over the lanes."""
    if spec.sharding is None:
        return {i.name: () for i in spec.inputs}
    mesh, given = get_stage_mesh(spec), spec.sharding.placements
    return {i.name: parse_placements(given.get(i.name, ""), mesh) for i in spec.sharding.inputs}


def get_row_multiple(spec: ProgramSpec) -> int:
    """What the rows of each microbatch must be a multiple of: the data-parallel degree."""
    return math.lcm(*count_row_parts(spec).values())


def count_dim_parts(mesh: Mesh, placements: Placements, dim: int) -> int:
    """Into how many equal parts a dim is cut."""
    parts, outer = 1, 1
    for placement, size in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            parts, outer = parts * size, max(outer, placement.outer)
    return parts * outer


def find_uneven_dims(spec: ProgramSpec, cut: MicrobatchSplit) -> list[Problem]:
    """Problems with inputs whose symbolic dims do not fall into equal parts."""
    if spec.sharding is None:
        return []
    mesh, placements = get_stage_mesh(spec), get_input_placements(spec)
    found: dict[Problem, None] = {}
    for given in spec.sharding.inputs:
        for dim, entry in enumerate(given.shape):
            parts = count_dim_parts(mesh, placements[given.name], dim)
            if isinstance(entry, int) or parts == 1:
                continue
            for piece in cut.inputs:
                size = piece[given.name].shape[dim] if given.name in piece else 0
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
