"""Reduction of sparse gradients over mesh ranks: every mesh rank gathers the rows of all.

Two small exchanges share the numbers of rows, then ids and values are gathered, for all tables of a
stage together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from fxpart.collectives import Communicator
from fxpart.runtime.embedding_tables.sparse_gradient_parts import (
    SparseGradientParts,
    merge_parts,
)

_NONE = -1  # no gradient, unlike a gradient without rows


def gather(
    mesh: Communicator,
    axes: tuple[str, ...],
    mine: Sequence[tuple[torch.Tensor, SparseGradientParts | None]],
) -> list[SparseGradientParts | None]:
    """Gather the rows of all mesh ranks per table, ordered by backward, then by mesh rank.

    mine: tables and this mesh rank's parts; equal tables on every mesh rank. None for a table
    without any gradient.
    """
    mesh_ranks, device = mesh.size(axes), mine[0][0].device
    counts = [_NONE if part is None else len(part.lengths) for _, part in mine]
    table = (
        _all_gather(mesh, axes, torch.tensor(counts, device=device)).view(mesh_ranks, -1).tolist()
    )
    lengths = [n for _, part in mine if part is not None for n in part.lengths]
    sizes = [sum(max(n, 0) for n in row) for row in table]
    flat = _all_gather(
        mesh, axes, torch.tensor(lengths, dtype=torch.long, device=device), sizes
    ).tolist()
    lengths_by_rank = _split_lengths(table, flat)
    ids = _gather_rows(mesh, axes, mine, lengths_by_rank, ids=True)
    values = _gather_rows(mesh, axes, mine, lengths_by_rank, ids=False)
    found: list[SparseGradientParts | None] = []
    for at in range(len(mine)):
        ranks_with_rows = [
            mesh_rank
            for mesh_rank in range(mesh_ranks)
            if lengths_by_rank[mesh_rank][at] is not None
        ]
        parts = [
            SparseGradientParts(tuple(lengths_by_rank[i][at] or ()), ids[i][at], values[i][at])
            for i in ranks_with_rows
        ]
        found.append(merge_parts((range(len(p.lengths)), p) for p in parts) if parts else None)
    return found


LengthsByRank = list[list[list[int] | None]]  # [mesh rank][table]: rows of each backward


def _split_lengths(table: list[list[int]], flat: list[int]) -> LengthsByRank:
    found: LengthsByRank = []
    at = 0
    for row in table:
        found.append([])
        for count in row:
            found[-1].append(None if count == _NONE else flat[at : at + count])
            at += max(count, 0)
    return found


def _gather_rows(
    mesh: Communicator,
    axes: tuple[str, ...],
    mine: Sequence[tuple[torch.Tensor, SparseGradientParts | None]],
    lengths_by_rank: LengthsByRank,
    *,
    ids: bool,
) -> list[list[torch.Tensor]]:
    """Gather ids or values by mesh rank and table; one exchange per dtype."""
    found = [[torch.empty(0)] * len(mine) for _ in lengths_by_rank]
    kinds: dict[torch.dtype, list[int]] = {}
    for at, (like, _) in enumerate(mine):
        kinds.setdefault(torch.long if ids else like.dtype, []).append(at)
    for dtype, tables in kinds.items():
        shapes = [[_shape(lengths_by_rank[mesh_rank][at], mine[at][0], ids) for at in tables]
                  for mesh_rank in range(len(lengths_by_rank))]  # fmt: skip
        counts = [[torch.Size(shape).numel() for shape in row] for row in shapes]
        own = [part.ids if ids else part.values for at in tables
               if (part := mine[at][1]) is not None]  # fmt: skip
        empty = torch.empty(0, dtype=dtype, device=mine[0][0].device)
        flat = torch.cat([empty, *(tensor.reshape(-1) for tensor in own)])
        gathered = _all_gather(mesh, axes, flat, [sum(row) for row in counts])
        starts = [0, *accumulate(n for row in counts for n in row)]
        spans = iter(pairwise(starts))
        for mesh_rank, row in enumerate(shapes):
            for at, shape in zip(tables, row, strict=True):
                start, stop = next(spans)
                found[mesh_rank][at] = gathered[start:stop].view(shape)
    return found


def _shape(lengths: list[int] | None, like: torch.Tensor, ids: bool) -> tuple[int, ...]:
    rows = sum(lengths or ())
    return (rows,) if ids else (rows, *like.shape[1:])


def _all_gather(
    mesh: Communicator, axes: tuple[str, ...], flat: torch.Tensor, sizes: list[int] | None = None
) -> torch.Tensor:
    if sizes is not None and not sum(sizes):
        return flat
    return mesh.start_all_gather(flat, axes, sizes).wait()
