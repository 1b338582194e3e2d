"""A mesh rank's part of each microbatch of the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem, error
from fxpart.program.spec import InputSpec, ProgramSpec
from fxpart.runtime.batch.batch_reader import BatchReader, LocalBatch, MicrobatchSplit, Shape
from fxpart.runtime.batch.batch_totals import BatchTotals
from fxpart.runtime.batch.row_repetition import repeat_rows
from fxpart.runtime.batch.symbolic_shapes import find_symbol_sources
from fxpart.runtime.mesh.mesh_ranks import MeshRank, get_stage_mesh
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.sharding import Placements, Shard, parse_placements
from fxpart.sharding.placement import count_dim_parts

_ROUNDING = 1e-6  # Tolerance for a divisor with a small epsilon that avoids division by zero.


class GlobalBatchReader:
    """Reader of the global batch that gives each mesh rank of this process its part."""

    def __init__(
        self, mesh_ranks: Sequence[MeshRank], constants: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """mesh_ranks: of this process. constants: of totals, as for :class:`BatchTotals`."""
        self._spec = mesh_ranks[0].spec
        self.needed = find_needed_inputs(mesh_ranks)
        self._reader = BatchReader(self._spec, get_row_multiple(self._spec), self.needed, constants)
        weight = self._spec.weight
        self._weight = (
            None if weight is None else BatchTotals(weight, self._spec.symbols, constants)
        )
        self._parts = [BatchSlicer(mesh_rank.spec, mesh_rank.index) for mesh_rank in mesh_ranks]

    def read(self, batch: Any, microbatches: int) -> MicrobatchSplit:
        """Return the global batch in microbatches; FXP105 with every problem."""
        return self.cut(self.look(batch), microbatches)

    def look(self, batch: Any, *, local: bool = False) -> LocalBatch:
        """Return the tensors of the batch; FXP105 with every problem.

        local: the batch has only the rows of this process's mesh ranks.
        """
        seen = self._reader.look(batch)
        if not local:
            return seen
        self._check_local()
        parts = count_row_parts(self._spec)
        if len({part.place for part in self._parts}) > 1:
            raise error(
                "FXP109",
                where="local=True",
                why="this process runs several mesh ranks, which have different rows",
                fix="pass the global batch",
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
    def has_batch_weight(self) -> bool:
        """Return whether the weight of a batch in a mean over batches is not its rows."""
        return self._weight is not None

    def weight(self, seen: LocalBatch) -> float | None:
        """Return the divisor of the batch's loss, or None if this process cannot compute it.

        FXP109 if the batch has only the rows of this process's mesh ranks.
        """
        assert self._weight is not None, "called only for programs with a batch weight"
        if seen.local and get_row_multiple(self._spec) > 1:
            raise error(
                "FXP109",
                where="local=True",
                why="accumulated batches are weighted by a number of the whole batch, such as the "
                "count of its valid tokens",
                fix="pass the global batch, or do not accumulate gradients",
            )
        found = self._weight.of(seen.tensors)
        return float(next(iter(found.values()))) if found else None

    def may_repeat(self, seen: LocalBatch, microbatches: int, count: int) -> bool:
        """Return whether results stay the same if each row is repeated ``count`` times.

        If the loss is divided by a number of the batch, that number must scale with the rows. Ranks
        that cannot compute it return True and leave the check to those that can.
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
        """Raise FXP109 if the loss needs a number of all rows and a rank would have only some."""
        if self._spec.totals is not None and get_row_multiple(self._spec) > 1:
            raise error(
                "FXP109",
                where="local=True",
                why="the loss is divided by a number of the whole batch, such as the count of its "
                "valid tokens",
                fix="pass the global batch, or compile with microbatches=1",
            )

    def cut(
        self,
        seen: LocalBatch,
        microbatches: int,
        others: Mapping[str, Shape] | None = None,
    ) -> MicrobatchSplit:
        """Return the global batch in microbatches, as BatchReader.cut does."""
        cut = self._reader.cut(seen, microbatches, others)
        problems = find_uneven_dims(self._spec, cut)
        if problems:
            raise FxpartError(problems)
        return cut

    @property
    def multiple(self) -> int:
        """The number that divides the rows of each microbatch, after repetition."""
        return get_row_multiple(self._spec)

    @property
    def row_axes(self) -> frozenset[str]:
        """Return the mesh axes along which the rows of any input are sharded."""
        mesh, placements = get_stage_mesh(self._spec), get_input_placements(self._spec)
        return frozenset(
            axis
            for given in get_global_inputs(self._spec)
            for axis, placement in zip(mesh.names, placements[given.name], strict=False)
            if isinstance(placement, Shard) and placement.dim == given.batch_dim
        )

    def parts(self, cut: MicrobatchSplit) -> list[MicrobatchSplit]:
        """Return each mesh rank's part."""
        return [part.read(cut) for part in self._parts]


class BatchSlicer:
    """Selects one mesh rank's part of batches that were read whole."""

    def __init__(self, spec: ProgramSpec, mesh_rank: int) -> None:
        """spec: the program of any mesh rank."""
        self._mesh_rank = mesh_rank
        self._whole = spec.sharding is None
        self._symbols, self._inputs = spec.symbols, spec.inputs
        self._mesh = get_stage_mesh(spec)
        self._dims = {given.name: given.batch_dim for given in get_global_inputs(spec)}
        self._placements = get_input_placements(spec)
        self._unsharded_rows = {
            name: tuple(
                None if isinstance(p, Shard) and p.dim == self._dims[name] else p
                for p in placements
            )
            for name, placements in self._placements.items()
        }
        self._known: dict[tuple[str, tuple[int, ...], bool], ShardLayout] = {}

    @property
    def place(self) -> tuple[int, ...]:
        """Return the mesh coordinate along the axes that shard the rows of any input."""
        at = self._mesh.coordinate(self._mesh_rank)
        return tuple(
            at[axis]
            for axis in range(len(at))
            if any(self._placements[n][axis] != self._unsharded_rows[n][axis] for n in self._dims)
        )

    def rows(self, name: str, count: int) -> torch.Tensor:
        """Return which of ``count`` rows of an input belong to this mesh rank."""
        placements = tuple(
            p and Shard(0, outer=p.outer) if isinstance(p, Shard) and p != q else None
            for p, q in zip(self._placements[name], self._unsharded_rows[name], strict=True)
        )
        return ShardLayout((count,), placements, self._mesh).part(
            torch.arange(count), self._mesh_rank
        )

    def read(self, cut: MicrobatchSplit) -> MicrobatchSplit:
        """Return the same microbatches with this mesh rank's parts and their symbol sizes."""
        if self._whole:
            return (
                cut
                if cut.local is None
                else replace(cut, inputs=self._slice_local_rows(cut, cut.inputs))
            )
        inputs = tuple(
            {
                name: self._pieces(name, t.shape).part(t, self._mesh_rank)
                if name in self._dims
                else t
                for name, t in piece.items()
            }
            for piece in cut.inputs
        )
        read = find_symbol_sources(self._symbols, self._inputs, inputs[0])
        sizes = tuple(
            {symbol: piece[name].shape[dim] for symbol, (name, dim) in read.items()}
            for piece in inputs
        )
        inputs = inputs if cut.local is None else self._slice_local_rows(cut, inputs)
        return MicrobatchSplit(inputs, sizes, cut.rows, cut.weights, cut.repeats, totals=cut.totals)

    def _slice_local_rows(
        self, cut: MicrobatchSplit, shapes: Sequence[dict[str, torch.Tensor]]
    ) -> tuple[dict[str, torch.Tensor], ...]:
        """Return the pieces of a batch with only this mesh rank's rows, shaped as ``shapes``."""
        assert cut.local is not None
        found = [dict(piece) for piece in shapes]
        for name, tensor in cut.local.items():
            dim = self._dims[name]
            if dim is None:
                parts: Sequence[torch.Tensor] = [tensor] * len(found)
            else:
                parts = torch.split(tensor, [piece[name].shape[dim] for piece in shapes], dim)
            for piece, part in zip(found, parts, strict=True):
                piece[name] = self._pieces(name, part.shape, across=True).part(
                    part, self._mesh_rank
                )
        return tuple(found)

    def _pieces(self, name: str, shape: tuple[int, ...], *, across: bool = False) -> ShardLayout:
        """across: the rows are already those of this mesh rank."""
        key = (name, tuple(shape), across)
        if key not in self._known:
            placements = (self._unsharded_rows if across else self._placements)[name]
            self._known[key] = ShardLayout(key[1], placements, self._mesh)
        return self._known[key]


def find_needed_inputs(mesh_ranks: Sequence[MeshRank]) -> frozenset[str]:
    """Return the inputs that the stages of this process take."""
    taken = {
        value.name
        for mesh_rank in mesh_ranks
        for stage in mesh_rank.spec.stages
        if stage.index in mesh_rank.modules
        for value, source in zip(stage.inputs, stage.sources, strict=True)
        if source < 0
    }
    totals = mesh_ranks[0].spec.totals
    if totals is not None and taken & set(totals.names):
        taken |= set(totals.inputs)
    return frozenset(taken & {given.name for given in get_global_inputs(mesh_ranks[0].spec)})


def get_global_inputs(spec: ProgramSpec) -> tuple[InputSpec, ...]:
    """Return the specs of the user's tensors before sharding."""
    return spec.inputs if spec.sharding is None else spec.sharding.inputs


def count_row_parts(spec: ProgramSpec) -> dict[str, int]:
    """Return the number of equal parts of each input's rows."""
    mesh, placements = get_stage_mesh(spec), get_input_placements(spec)
    return {
        given.name: 1
        if given.batch_dim is None
        else count_dim_parts(mesh, placements[given.name], given.batch_dim)
        for given in get_global_inputs(spec)
    }


def get_input_placements(spec: ProgramSpec) -> dict[str, Placements]:
    """Return the placements of each input over the mesh."""
    if spec.sharding is None:
        return {i.name: () for i in spec.inputs}
    mesh, given = get_stage_mesh(spec), spec.sharding.placements
    return {i.name: parse_placements(given.get(i.name, ""), mesh) for i in spec.sharding.inputs}


def get_row_multiple(spec: ProgramSpec) -> int:
    """Return the divisor of the rows of each microbatch: the data-parallel degree."""
    return math.lcm(*count_row_parts(spec).values())


def get_dim_multiple(spec: ProgramSpec, dim: int) -> int:
    """Return the divisor of a dim's size in all inputs that have it."""
    if spec.sharding is None:
        return 1
    mesh, placements = get_stage_mesh(spec), get_input_placements(spec)
    return math.lcm(*(
        count_dim_parts(mesh, placements[given.name], dim)
        for given in spec.sharding.inputs
        if dim < len(given.shape)
    ))  # fmt: skip


def find_uneven_dims(spec: ProgramSpec, cut: MicrobatchSplit) -> list[Problem]:
    """Return problems with inputs whose symbolic dims do not divide into equal parts."""
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
                    found[_make_uneven_problem(given, dim, size, parts, spec.sharding.mesh)] = None
    return list(found)


def _make_uneven_problem(given: InputSpec, dim: int, size: int, parts: int, mesh: str) -> Problem:
    return Problem(
        "FXP105",
        "batch" + "".join(f"[{key!r}]" for key in given.path),
        f"dim {dim} is {size}, and the mesh {mesh} shards it into {parts} equal parts",
        f"pass a multiple of {parts}",
    )
