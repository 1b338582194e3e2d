"""Row-sharded embedding tables on batch axes: ids are sent to the rows' ranks, rows return.

Every rank sends each of its ids to the rank that stores the row and receives the row (GShard's
dispatch, as recommender systems shard their tables: Naumov et al., DLRM, 2019, section 4). Equal
ids of a call receive their row once, and recomputed lookups receive none (:class:`RowCache`).
Gradients take the reverse path, one row per id, in rank order, so sums have the order of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpart.collectives.communicator import Communicator
from fxpart.collectives.expert_parallel import _moved
from fxpart.collectives.factor_shares import Axes, spans
from fxpart.collectives.vocab_parallel_embedding import _NONE, Bags, _refuse, compute_bag_indices

_ATEN = torch.ops.aten


def embedding_sent(
    mesh: Communicator,
    axes: Axes,
    size: int,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = _NONE,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Run ``aten.embedding`` on this rank's indices, with a table of ``size`` rows on the axes.

    Raise FXP108 for gradients scaled by index frequency.
    """
    _refuse("embedding_sent", scale_grad_by_freq)
    if mesh.fake:
        return _assumed(weight, indices)
    request = RowRequest(axes, size, weight, indices.reshape(-1), padding_idx, sparse, 0)
    if mesh.requests is not None:
        mesh.requests.append(request)
        return indices
    rows, _ = _rows(mesh, request)
    return rows.view(*indices.shape, weight.shape[1])


def embedding_bag_sent(
    mesh: Communicator,
    axes: Axes,
    size: int,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = _NONE,
) -> Bags:
    """Run ``aten.embedding_bag`` on this rank's bags; offsets are relative to its first index.

    Rows are sent, not bag sums, so that a bag is summed in the order of a single process.
    """
    _refuse("embedding_bag_sent", scale_grad_by_freq)
    offsets = offsets - offsets[:1]
    bags = offsets.shape[0] - include_last_offset
    there, kept = None, indices
    if padding_idx is not None and padding_idx != _NONE and not mesh.fake:
        there = indices.ne(padding_idx)
        kept = indices[there]
    request = RowRequest(axes, size, weight, kept, _NONE, sparse, bags)
    if mesh.requests is not None:
        mesh.requests.append(request)
        return indices, indices, indices, indices
    with torch.no_grad():
        _, bag_of, sizes, largest = compute_bag_indices(
            weight, size, indices, offsets, mode, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    if mesh.fake:
        rows, first = _assumed(weight, indices), 0
    else:
        if there is not None:
            before = torch.cat([offsets.new_zeros(1), there.cumsum(0).to(offsets.dtype)])
            offsets = before[offsets]
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights[there]
        rows, first = _rows(mesh, request)
    summed: torch.Tensor = _ATEN.embedding_bag.default(
        rows, torch.arange(kept.shape[0], device=kept.device), offsets, False, mode, False,
        per_sample_weights, include_last_offset,
    )[0]  # fmt: skip
    return summed, bag_of + first, sizes, largest


class TableRows:
    """Received rows of a table. rows: [n, width]."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Without rows; weight: their table, in part."""
        self._ids = self._places = torch.empty(0, dtype=torch.long, device=weight.device)
        self.rows = weight.detach()[:0]

    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, RowOrder]:
        """Return the places of ascending ids among ``rows``, after those without one are added.

        Also the positions of the latter among ``ids``, and the argument of :meth:`add` for them.
        """
        at = torch.searchsorted(self._ids, ids)
        near = at.clamp(max=max(len(self._ids) - 1, 0))
        absent = (
            self._ids[near] != ids if len(self._ids) else torch.ones_like(ids, dtype=torch.bool)
        )
        new = absent.nonzero().squeeze(1)
        places = self._places[near] if len(self._ids) else at.clone()
        fresh = torch.arange(len(self.rows), len(self.rows) + len(new), device=ids.device)
        places[new] = fresh
        to = at[new] + torch.arange(len(new), device=ids.device)
        return places, new, (to, ids[new], fresh)

    def add(self, order: RowOrder, rows: torch.Tensor) -> None:
        """Add the rows of ids that had none."""
        to, ids, places = order
        kept = torch.ones(len(self._ids) + len(ids), dtype=torch.bool, device=ids.device)
        kept[to] = False
        old = kept.nonzero().squeeze(1)
        self._ids = _merge(old, self._ids, to, ids)
        self._places = _merge(old, self._places, to, places)
        self.rows = torch.cat([self.rows, rows]) if len(self.rows) else rows


# Positions among all ids, ids and places of rows that are added.
RowOrder = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _merge(
    old: torch.Tensor, present: torch.Tensor, new: torch.Tensor, added: torch.Tensor
) -> torch.Tensor:
    """Return both tensors in one, at these positions."""
    found = present.new_empty(len(old) + len(new))
    found[old], found[new] = present, added
    return found


class RowCache:
    """Rows that a rank has received in this step, by table: valid until the weights change.

    The microbatches of a step, and their recomputation, read the same weights, so cached rows are
    exact. An update changes most of them, so none is kept for the next step. A recomputed lookup
    receives no row again. Without recomputation, the search takes more time than it saves on links
    of 1 Gbit/s and faster, measured with gloo.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._tables: dict[int, tuple[torch.Tensor, TableRows]] = {}

    def of(self, weight: torch.Tensor) -> TableRows | None:
        """Return the rows of a table; None if the tensor is not a parameter, but made from one."""
        if not isinstance(weight, nn.Parameter):
            return None
        if id(weight) not in self._tables:
            self._tables[id(weight)] = weight, TableRows(weight)
        return self._tables[id(weight)][1]


@contextmanager
def cache_rows(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Cache received rows in the context, in which no weights of the stage modules change."""
    meshes: list[Communicator] = [vars(m)["mesh"] for m in modules if "mesh" in vars(m)]
    for mesh in meshes:
        mesh.row_cache = RowCache()
    try:
        yield
    finally:
        for mesh in meshes:
            mesh.row_cache = None


@dataclass(frozen=True)
class RowRequest:
    """A lookup of ids [n] in a table of ``size`` rows on the axes.

    own: a number of this rank, which is summed over earlier ranks.
    """

    axes: Axes
    size: int
    weight: torch.Tensor
    ids: torch.Tensor
    padding: int
    sparse: bool
    own: int


def get_row_ranges(mesh: Communicator, axes: Axes, size: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each rank."""
    return [(int(first), int(count)) for first, count in spans(mesh, axes, size)]


def _rows(mesh: Communicator, request: RowRequest) -> tuple[torch.Tensor, int]:
    """Return the rows of the ids as [n, width], and the sum of ``own`` over earlier ranks."""
    if mesh.rows_ahead is not None and (found := mesh.rows_ahead.take(request)) is not None:
        return found
    axes, weight, padding = request.axes, request.weight, request.padding
    held = get_row_ranges(mesh, axes, request.size)
    start, length = held[mesh.place(axes)]
    # By id, and so by rank; equal ids stay in their order.
    ids, order = torch.sort(request.ids.long(), stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=first[1:])
    places = first.cumsum(0) - 1  # Of the rows that are received for the ids.
    wanted, table, new = first, None if mesh.row_cache is None else mesh.row_cache.of(weight), None
    if table is not None:
        distinct = first.nonzero().squeeze(1)
        known, absent, new = table.find(ids[distinct])
        places = known[places]
        wanted = torch.zeros_like(first)
        wanted[distinct[absent]] = True
    ends = [0, *(first + count for first, count in held)]
    bounds = torch.searchsorted(ids, torch.tensor(ends, device=ids.device))
    before = torch.cat([bounds.new_zeros(1), wanted.cumsum(0)])[bounds]
    counts = torch.stack([bounds, before, torch.full_like(bounds, request.own)], 1)
    counts[1:, :2] -= counts[:-1, :2].clone()
    outside, *give = counts.tolist()
    check_ids(ids, request.size, inside=outside[0] == 0 and sum(n for n, *_ in give) == len(ids))
    # Gradients need each id; without them, ids of wanted rows are enough.
    trained = weight.requires_grad and torch.is_grad_enabled()
    sent = torch.where(wanted, ids, ~ids) if trained else ids[wanted]
    threes = [3] * len(held)
    received = mesh.start_all_to_all(counts[1:].reshape(-1), axes, threes, threes).wait().tolist()
    get = [received[at : at + 3] for at in range(0, len(received), 3)]
    each = 0 if trained else 1
    way = [row[each] for row in give], [row[each] for row in get]
    requested = mesh.start_all_to_all(sent, axes, *way).wait()
    theirs = requested[requested >= 0] if trained else requested
    requested = torch.where(requested < 0, ~requested, requested) - start
    serve, fetch = [row[1] for row in get], [row[1] for row in give]
    places = torch.empty_like(places).index_put_((order,), places)

    def fetch_rows(weight: torch.Tensor) -> torch.Tensor:
        rows = weight.index_select(0, theirs - start)
        rows = _moved(rows, mesh, axes, serve, fetch)
        if table is not None:
            table.add(new, rows)
            rows = table.rows
        return rows.index_select(0, places)

    mesh.counts.note_rows(axes, len(ids), sum(fetch))
    inside = start <= padding < start + length
    lookup = RowLookup(
        mesh, axes, order, fetch_rows, requested, way, padding - start if inside else _NONE,
        request.sparse,
    )  # fmt: skip
    return lookup.apply(weight), sum(row[2] for row in get[: mesh.place(axes)])


@dataclass(frozen=True)
class RowLookup:
    """A lookup of ids, whose gradients are sent in ``order``.

    fetch_rows: returns the rows of all ids in their original order. requested: local row number of
    each id of each rank, whose gradients arrive here. way: numbers of them by rank, sent and
    received. advance: called before and after that.
    """

    mesh: Communicator
    axes: Axes
    order: torch.Tensor
    fetch_rows: Callable[[torch.Tensor], torch.Tensor]
    requested: torch.Tensor
    way: tuple[list[int], list[int]]
    padding: int
    sparse: bool
    advance: Callable[[], None] | None = None

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows; each id's gradient is sent to the rank that stores its row."""
        found: torch.Tensor = _SentRows.apply(weight, self)  # type: ignore[no-untyped-call]
        return found


class _SentRows(torch.autograd.Function):
    """Fetch the rows of a lookup; every id's gradient is sent to the rank that stores its row."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, lookup: RowLookup) -> torch.Tensor:
        ctx.way = lookup.mesh, lookup.axes, *lookup.way
        ctx.order, ctx.requested, ctx.advance = lookup.order, lookup.requested, lookup.advance
        ctx.form = len(weight), lookup.padding, False, lookup.sparse
        return lookup.fetch_rows(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.advance is not None:
            ctx.advance()
        arrived = _moved(gradients[0][ctx.order], *ctx.way)
        if ctx.advance is not None:
            ctx.advance()
        found: torch.Tensor = _ATEN.embedding_backward.default(arrived, ctx.requested, *ctx.form)
        return found, None


def check_ids(ids: torch.Tensor, size: int, *, inside: bool) -> None:
    """Raise IndexError, as torch does for ids outside of a table."""
    if not inside:
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise IndexError(
            f"index out of range: id {wrong} is not a row of a table of {size} rows "
            f"(0 to {size - 1})"
        )


def _assumed(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return a result of the right shape if the ids are unknown."""
    return _ATEN.embedding.default(weight, indices)  # type: ignore[no-any-return]
