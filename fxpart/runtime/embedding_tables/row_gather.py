"""Sums of sparse gradients over lanes: every lane gets the rows of all, and nothing but rows moves.

Two small exchanges tell how many rows come from whom, then ids and numbers travel, those of all
tables of a stage together.
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

_NONE = -1  # there is no gradient, which is not the same as one without rows


def gather(
    mesh: Communicator,
    axes: tuple[str, ...],
    mine: Sequence[tuple[torch.Tensor, SparseGradientParts | None]],
) -> list[SparseGradientParts | None]:
    """For each table the rows of all lanes of the axes, by backward and then by lane.

    mine: tables and this lane's parts, the same tables on every lane. None where no lane has any.
    """
    lanes, device = mesh.size(axes), mine[0][0].device
    counts = [_NONE if part is None else len(part.lengths) for _, part in mine]
    table = _all(mesh, axes, torch.tensor(counts, device=device)).view(lanes, -1).tolist()
    lengths = [n for _, part in mine if part is not None for n in part.lengths]
    sizes = [sum(max(n, 0) for n in row) for row in table]
    flat = _all(mesh, axes, torch.tensor(lengths, dtype=torch.long, device=device), sizes).tolist()
    told = _told(table, flat)
    ids = _travel(mesh, axes, mine, told, ids=True)
    values = _travel(mesh, axes, mine, told, ids=False)
    found: list[SparseGradientParts | None] = []
    for at in range(len(mine)):
        there = [lane for lane in range(lanes) if told[lane][at] is not None]
        parts = [
            SparseGradientParts(tuple(told[i][at] or ()), ids[i][at], values[i][at]) for i in there
        ]
        found.append(merge_parts((range(len(p.lengths)), p) for p in parts) if parts else None)
    return found


Told = list[list[list[int] | None]]  # [lane][table]: rows of each backward


def _told(table: list[list[int]], flat: list[int]) -> Told:
    found: Told = []
    at = 0
    for row in table:
        found.append([])
        for count in row:
            found[-1].append(None if count == _NONE else flat[at : at + count])
            at += max(count, 0)
    return found


def _travel(
    mesh: Communicator,
    axes: tuple[str, ...],
    mine: Sequence[tuple[torch.Tensor, SparseGradientParts | None]],
    told: Told,
    *,
    ids: bool,
) -> list[list[torch.Tensor]]:
    """By lane and table the ids, or the numbers; one exchange for each dtype."""
    found = [[torch.empty(0)] * len(mine) for _ in told]
    kinds: dict[torch.dtype, list[int]] = {}
    for at, (like, _) in enumerate(mine):
        kinds.setdefault(torch.long if ids else like.dtype, []).append(at)
    for dtype, tables in kinds.items():
        shapes = [[_shape(told[lane][at], mine[at][0], ids) for at in tables]
                  for lane in range(len(told))]  # fmt: skip
        counts = [[torch.Size(shape).numel() for shape in row] for row in shapes]
        own = [part.ids if ids else part.values for at in tables
               if (part := mine[at][1]) is not None]  # fmt: skip
        empty = torch.empty(0, dtype=dtype, device=mine[0][0].device)
        flat = torch.cat([empty, *(tensor.reshape(-1) for tensor in own)])
        line = _all(mesh, axes, flat, [sum(row) for row in counts])
        starts = [0, *accumulate(n for row in counts for n in row)]
        spans = iter(pairwise(starts))
        for lane, row in enumerate(shapes):
            for at, shape in zip(tables, row, strict=True):
                start, stop = next(spans)
                found[lane][at] = line[start:stop].view(shape)
    return found


def _shape(lengths: list[int] | None, like: torch.Tensor, ids: bool) -> tuple[int, ...]:
    rows = sum(lengths or ())
    return (rows,) if ids else (rows, *like.shape[1:])


def _all(
    mesh: Communicator, axes: tuple[str, ...], flat: torch.Tensor, sizes: list[int] | None = None
) -> torch.Tensor:
    if sizes is not None and not sum(sizes):
        return flat
    return mesh.start_all_gather(flat, axes, sizes).wait()
