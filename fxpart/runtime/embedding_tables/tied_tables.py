"""Sparse gradients of tables on several stages (ties, replicas): reduced by the owner.

The owner orders the rows as a single process does: by microbatch, and within one later uses first.
Replicas of a stage take the microbatches round-robin. Rows of all tables with the same stages are
sent together: their number, their ids, and their values in chunks of at most 25 MiB (or one table),
because many small messages are slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fxpart.program.spec import ProgramSpec
from fxpart.runtime.embedding_tables.sparse_gradient_parts import (
    SparseGradientParts,
    merge_parts,
)
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.state.model_state import ModelState, StateEntry
from fxpart.runtime.transport.interface import STATE, Transport

PartsByTable = list[SparseGradientParts | None]  # by table
_NONE = -1  # no gradient, unlike a gradient without rows


@dataclass(frozen=True)
class TiedTables:
    """Tables on the same stages, on one mesh rank."""

    state: ModelState
    entries: Sequence[StateEntry]
    mesh_rank: int

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages with the tables."""
        return self.entries[0].stages

    @property
    def owner(self) -> int:
        """The stage that reduces."""
        return self.entries[0].spec.owner

    def rank(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self.state.rank(stage, self.mesh_rank)

    def local_tables(self, stage: int | None = None) -> list[torch.Tensor]:
        """Return the tables of a stage, or of any stage in this process."""
        return [
            next(
                t for (s, at), t in e.copies.items() if at == self.mesh_rank and stage in (None, s)
            )
            for e in self.entries
        ]


def collect_rows_at_owner(tables: TiedTables, parts: dict[int, PartsByTable]) -> PartsByTable:
    """Return the rows of all stages in the process of the owner; None elsewhere, or without rows.

    parts: of the stages in this process; a tensor shared by stages is given once.
    """
    transport, owner_rank = tables.state.transport, tables.rank(tables.owner)
    sends: list[object] = []
    for stage in tables.stages:
        rank = tables.rank(stage)
        if stage in parts and rank != owner_rank:
            sends += _send(transport, (rank, owner_rank), parts[stage])
    found: list[dict[int, SparseGradientParts]] = [{} for _ in tables.entries]
    if tables.owner in parts:
        no_parts: PartsByTable = [None] * len(found)
        like = tables.local_tables(tables.owner)
        for stage in tables.stages:
            rank = tables.rank(stage)
            here = parts.get(stage, no_parts)
            received = here if rank == owner_rank else _receive(transport, (rank, owner_rank), like)
            for table, part in zip(found, received, strict=True):
                if part is not None:
                    table[stage] = part
    for handle in sends:
        transport.wait(handle)
    spec = tables.state.mesh_ranks[0].spec
    return [_merge_in_order(spec, table) if table else None for table in found]


def broadcast_owner_rows(tables: TiedTables, totals: PartsByTable) -> PartsByTable:
    """Return the owner's rows in every process with the tables. totals: in the owner's process."""
    transport, owner_rank = tables.state.transport, tables.rank(tables.owner)
    others = dict.fromkeys(map(tables.rank, tables.stages))
    others.pop(owner_rank, None)
    if owner_rank in transport.local:
        messages = list(_messages(totals))
        sends = [transport.send(owner_rank, rank, STATE, m) for rank in others for m in messages]
        for rank in others:
            if rank in transport.local:  # this process has both ranks
                _receive(transport, (owner_rank, rank), tables.local_tables())
        for handle in sends:
            transport.wait(handle)
        return totals
    found: PartsByTable = [None] * len(tables.entries)
    for rank in others:
        if rank in transport.local:
            found = _receive(transport, (owner_rank, rank), tables.local_tables())
    return found


def _merge_in_order(
    spec: ProgramSpec, found: dict[int, SparseGradientParts]
) -> SparseGradientParts:
    """Merge one table's rows by microbatch, later stages first."""
    return merge_parts(
        (_microbatches(spec, s, found[s]), found[s]) for s in sorted(found, reverse=True)
    )


def _microbatches(spec: ProgramSpec, stage: int, parts: SparseGradientParts) -> Iterator[int]:
    """Yield the microbatch of each backward of a stage."""
    replicas = next((group for group in spec.replicas if stage in group), (stage,))
    own = [at for at, copy in enumerate(replicas) if copy == stage]
    for number in range(len(parts.lengths)):
        yield number // len(own) * len(replicas) + own[number % len(own)]


Route = tuple[int, int]  # from rank, to rank


def _send(transport: Transport, route: Route, parts: PartsByTable) -> list[object]:
    return [transport.send(*route, STATE, message) for message in _messages(parts)]


def _messages(parts: PartsByTable) -> Iterator[torch.Tensor]:
    """Yield the number of backwards per table, the rows of each, then chunks of ids and values."""
    yield torch.tensor([_NONE if part is None else len(part.lengths) for part in parts])
    lengths = [n for part in parts if part is not None for n in part.lengths]
    if not sum(lengths):
        yield from [torch.tensor(lengths)] if lengths else []
        return
    yield torch.tensor(lengths)
    with_rows = [part for part in parts if part is not None and part.ids.numel()]
    for chunk in _split_into_chunks(
        [(part.values.nbytes, part.values.dtype) for part in with_rows]
    ):
        yield _flatten([with_rows[at].ids for at in chunk])
        yield _flatten([with_rows[at].values for at in chunk])


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def _split_into_chunks(rows: Sequence[tuple[int, torch.dtype]]) -> Iterator[list[int]]:
    """Yield runs of tables of one dtype with at most a bucket's bytes. rows: (bytes, dtype) of
    tables.
    """
    chunk: list[int] = []
    room = 0
    for at, (size, dtype) in enumerate(rows):
        if chunk and (size > room or dtype != rows[chunk[0]][1]):
            yield chunk
            chunk = []
        room = (room if chunk else reduce_scatter.BUCKET) - size
        chunk.append(at)
    if chunk:
        yield chunk


def _receive(transport: Transport, route: Route, like: Sequence[torch.Tensor]) -> PartsByTable:
    """Receive what :func:`_send` has sent. like: the tables."""
    cpu = torch.device("cpu")
    counts = _receive_tensor(transport, route, len(like), torch.long, cpu).tolist()
    flat = iter(
        _receive_tensor(transport, route, sum(max(n, 0) for n in counts), torch.long, cpu).tolist()
    )
    lengths_by_table = [None if n == _NONE else tuple(next(flat) for _ in range(n)) for n in counts]
    found: PartsByTable = [
        None if lengths is None else SparseGradientParts(
            lengths, torch.empty(0, dtype=torch.long, device=table.device),
            table.new_empty((0, *table.shape[1:])),
        )
        for lengths, table in zip(lengths_by_table, like, strict=True)
    ]  # fmt: skip
    with_rows = [at for at, lengths in enumerate(lengths_by_table) if lengths and sum(lengths)]
    shapes = [
        torch.Size((sum(lengths_by_table[at] or ()), *like[at].shape[1:])) for at in with_rows
    ]
    rows = [
        (n.numel() * like[at].itemsize, like[at].dtype)
        for at, n in zip(with_rows, shapes, strict=True)
    ]
    for chunk in _split_into_chunks(rows):
        tables, sizes = [with_rows[at] for at in chunk], [shapes[at] for at in chunk]
        table = like[tables[0]]
        sizes_ = [shape[0] for shape in sizes]
        ids = _receive_tensor(transport, route, sum(sizes_), torch.long, table.device).split(sizes_)
        sizes_ = [shape.numel() for shape in sizes]
        values = _receive_tensor(transport, route, sum(sizes_), table.dtype, table.device).split(
            sizes_
        )
        for at, shape, own, part in zip(tables, sizes, ids, values, strict=True):
            found[at] = SparseGradientParts(lengths_by_table[at] or (), own, part.view(shape))
    return found


def _receive_tensor(
    transport: Transport, route: Route, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=dtype, device=device)
    return transport.wait(transport.post(*route, STATE, (size,), dtype, device))
