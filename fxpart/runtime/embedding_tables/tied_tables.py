"""Sparse gradients of tables that several stages hold (ties, copies): rows to the owner and back.

The owner puts them in the order of one process: by microbatch, and within one the later uses first.
Copies of a stage have taken the microbatches in turns. Rows of all tables with the same holders
travel together: how many, their ids, and their numbers in pieces of at most 25 MiB (or of one
table), as messages of a few rows each would take longer than what is in them.
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

Found = list[SparseGradientParts | None]  # by table
_NONE = -1  # there is no gradient, which is not the same as one without rows


@dataclass(frozen=True)
class TiedTables:
    """Tables that the same stages hold, on one lane."""

    state: ModelState
    entries: Sequence[StateEntry]
    lane: int

    @property
    def stages(self) -> tuple[int, ...]:
        """The holders."""
        return self.entries[0].stages

    @property
    def owner(self) -> int:
        """The stage that sums."""
        return self.entries[0].spec.owner

    def rank(self, stage: int) -> int:
        """The process of a holder."""
        return self.state.rank(stage, self.lane)

    def held(self, stage: int | None = None) -> list[torch.Tensor]:
        """A holder's tables, by default of any in this process."""
        return [
            next(t for (s, at), t in e.copies.items() if at == self.lane and stage in (None, s))
            for e in self.entries
        ]


def collect_rows_at_owner(tables: TiedTables, parts: dict[int, Found]) -> Found:
    """The rows of all holders in the process of the owner; None elsewhere and where none has any.

    parts: of the holders in this process, by stage; those that share a tensor have it once.
    """
    transport, home = tables.state.transport, tables.rank(tables.owner)
    sends: list[object] = []
    for stage in tables.stages:
        rank = tables.rank(stage)
        if stage in parts and rank != home:
            sends += _send(transport, (rank, home), parts[stage])
    found: list[dict[int, SparseGradientParts]] = [{} for _ in tables.entries]
    if tables.owner in parts:
        nothing: Found = [None] * len(found)
        like = tables.held(tables.owner)
        for stage in tables.stages:
            rank = tables.rank(stage)
            here = parts.get(stage, nothing)
            got = here if rank == home else _receive(transport, (rank, home), like)
            for table, part in zip(found, got, strict=True):
                if part is not None:
                    table[stage] = part
    for handle in sends:
        transport.wait(handle)
    spec = tables.state.lanes[0].spec
    return [_in_order(spec, table) if table else None for table in found]


def broadcast_owner_rows(tables: TiedTables, totals: Found) -> Found:
    """The owner's rows in every process that holds the tables. totals: of the owner's process."""
    transport, home = tables.state.transport, tables.rank(tables.owner)
    others = dict.fromkeys(map(tables.rank, tables.stages))
    others.pop(home, None)
    if home in transport.local:
        messages = list(_messages(totals))
        sends = [transport.send(home, rank, STATE, m) for rank in others for m in messages]
        for rank in others:
            if rank in transport.local:  # one process has both ends
                _receive(transport, (home, rank), tables.held())
        for handle in sends:
            transport.wait(handle)
        return totals
    found: Found = [None] * len(tables.entries)
    for rank in others:
        if rank in transport.local:
            found = _receive(transport, (home, rank), tables.held())
    return found


def _in_order(spec: ProgramSpec, found: dict[int, SparseGradientParts]) -> SparseGradientParts:
    """Of one table, by microbatch and then the later stages first."""
    return merge_parts(
        (_microbatches(spec, s, found[s]), found[s]) for s in sorted(found, reverse=True)
    )


def _microbatches(spec: ProgramSpec, stage: int, parts: SparseGradientParts) -> Iterator[int]:
    """The microbatch of each of a stage's backwards."""
    turns = next((group for group in spec.replicas if stage in group), (stage,))
    own = [at for at, copy in enumerate(turns) if copy == stage]
    for number in range(len(parts.lengths)):
        yield number // len(own) * len(turns) + own[number % len(own)]


Way = tuple[int, int]  # from rank, to rank


def _send(transport: Transport, way: Way, parts: Found) -> list[object]:
    return [transport.send(*way, STATE, message) for message in _messages(parts)]


def _messages(parts: Found) -> Iterator[torch.Tensor]:
    """By table how many backwards there were, the rows of each, then ids and numbers in pieces."""
    yield torch.tensor([_NONE if part is None else len(part.lengths) for part in parts])
    lengths = [n for part in parts if part is not None for n in part.lengths]
    if not sum(lengths):
        yield from [torch.tensor(lengths)] if lengths else []
        return
    yield torch.tensor(lengths)
    some = [part for part in parts if part is not None and part.ids.numel()]
    for piece in _pieces([(part.values.nbytes, part.values.dtype) for part in some]):
        yield _line([some[at].ids for at in piece])
        yield _line([some[at].values for at in piece])


def _line(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def _pieces(rows: Sequence[tuple[int, torch.dtype]]) -> Iterator[list[int]]:
    """Neighbours of one dtype, so many that their bytes are at most a bucket's. rows: of tables."""
    piece: list[int] = []
    room = 0
    for at, (size, dtype) in enumerate(rows):
        if piece and (size > room or dtype != rows[piece[0]][1]):
            yield piece
            piece = []
        room = (room if piece else reduce_scatter.BUCKET) - size
        piece.append(at)
    if piece:
        yield piece


def _receive(transport: Transport, way: Way, like: Sequence[torch.Tensor]) -> Found:
    """What :func:`_send` has sent. like: the tables."""
    cpu = torch.device("cpu")
    counts = _take(transport, way, len(like), torch.long, cpu).tolist()
    flat = iter(_take(transport, way, sum(max(n, 0) for n in counts), torch.long, cpu).tolist())
    told = [None if n == _NONE else tuple(next(flat) for _ in range(n)) for n in counts]
    found: Found = [
        None if lengths is None else SparseGradientParts(
            lengths, torch.empty(0, dtype=torch.long, device=table.device),
            table.new_empty((0, *table.shape[1:])),
        )
        for lengths, table in zip(told, like, strict=True)
    ]  # fmt: skip
    some = [at for at, lengths in enumerate(told) if lengths and sum(lengths)]
    shapes = [torch.Size((sum(told[at] or ()), *like[at].shape[1:])) for at in some]
    rows = [
        (n.numel() * like[at].itemsize, like[at].dtype) for at, n in zip(some, shapes, strict=True)
    ]
    for piece in _pieces(rows):
        tables, sizes = [some[at] for at in piece], [shapes[at] for at in piece]
        table = like[tables[0]]
        each = [shape[0] for shape in sizes]
        ids = _take(transport, way, sum(each), torch.long, table.device).split(each)
        each = [shape.numel() for shape in sizes]
        values = _take(transport, way, sum(each), table.dtype, table.device).split(each)
        for at, shape, own, part in zip(tables, sizes, ids, values, strict=True):
            found[at] = SparseGradientParts(told[at] or (), own, part.view(shape))
    return found


def _take(
    transport: Transport, way: Way, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=dtype, device=device)
    return transport.wait(transport.post(*way, STATE, (size,), dtype, device))
