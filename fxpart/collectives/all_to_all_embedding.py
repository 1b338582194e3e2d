"""Row-sharded embedding tables on batch axes: ids are sent to the rows' ranks, rows return.

Every rank sends each of its ids to the rank that stores the row and receives the row (GShard's
dispatch, as recommender systems shard their tables: Naumov et al., DLRM, 2019, section 4). Equal
ids of a call receive their row once, and recomputed lookups receive none (:class:`RowCache`).
Gradients take the reverse path, one row per id, in rank order, so sums have the order of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    rows, _ = _rows(mesh, axes, size, weight, indices.reshape(-1), padding_idx, sparse, 0)
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
    with torch.no_grad():
        _, bag_of, sizes, largest = compute_bag_indices(
            weight, size, indices, offsets, mode, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    if mesh.fake:
        rows, kept, first = _assumed(weight, indices), indices, 0
    else:
        there = torch.ones_like(indices, dtype=torch.bool)
        if padding_idx is not None and padding_idx != _NONE:
            there = indices.ne(padding_idx)
        before = torch.cat([offsets.new_zeros(1), there.cumsum(0).to(offsets.dtype)])
        bags = offsets.shape[0] - include_last_offset
        offsets, kept = before[offsets], indices[there]
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights[there]
        rows, first = _rows(mesh, axes, size, weight, kept, _NONE, sparse, bags)
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


def _rows(
    mesh: Communicator,
    axes: Axes,
    size: int,
    weight: torch.Tensor,
    ids: torch.Tensor,
    padding: int,
    sparse: bool,
    own: int,
) -> tuple[torch.Tensor, int]:
    """Return the rows of ids [n] as [n, width], and the sum of ``own`` over earlier ranks."""
    held = [(int(first), int(count)) for first, count in spans(mesh, axes, size)]
    start, length = held[mesh.place(axes)]
    # By id, and so by rank; equal ids stay in their order.
    ids, order = torch.sort(ids.long(), stable=True)
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
    counts = torch.stack([bounds, before, torch.full_like(bounds, own)], 1)
    counts[1:, :2] -= counts[:-1, :2].clone()
    outside, *give = counts.tolist()
    _check(ids, size, outside[0] == 0 and sum(n for n, *_ in give) == len(ids))
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
    inside = start <= padding < start + length
    lookup = _Lookup(
        mesh, axes, order, torch.empty_like(places).index_put_((order,), places), table, new,
        theirs - start, [row[1] for row in get], [row[1] for row in give],
        requested, way, padding - start if inside else _NONE, sparse,
    )  # fmt: skip
    mesh.counts.note_rows(axes, len(ids), sum(lookup.fetch))
    home: torch.Tensor = _SentRows.apply(weight, lookup)  # type: ignore[no-untyped-call]
    return home, sum(row[2] for row in get[: mesh.place(axes)])


@dataclass(frozen=True)
class _Lookup:
    """A lookup of ids, whose gradients are sent in ``order``. places: of their rows.

    table, new: of the cached rows, if there is a cache. theirs: local numbers of the rows that the
    ranks fetch here. serve, fetch: numbers of rows by rank, sent and received. requested: local row
    number of each id of each rank, whose gradients arrive here. way: numbers of them by rank, sent
    and received.
    """

    mesh: Communicator
    axes: Axes
    order: torch.Tensor
    places: torch.Tensor
    table: Any
    new: RowOrder | None
    theirs: torch.Tensor
    serve: list[int]
    fetch: list[int]
    requested: torch.Tensor
    way: tuple[list[int], list[int]]
    padding: int
    sparse: bool

    def fetch_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ids, in their original order."""
        rows = weight.index_select(0, self.theirs)
        rows = _moved(rows, self.mesh, self.axes, self.serve, self.fetch)
        if self.new is not None:
            self.table.add(self.new, rows)
            rows = self.table.rows
        return rows.index_select(0, self.places)


class _SentRows(torch.autograd.Function):
    """Fetch the rows of a lookup; every id's gradient is sent to the rank that stores its row."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, lookup: _Lookup) -> torch.Tensor:
        ctx.way = lookup.mesh, lookup.axes, *lookup.way
        ctx.order, ctx.requested = lookup.order, lookup.requested
        ctx.form = len(weight), lookup.padding, False, lookup.sparse
        return lookup.fetch_rows(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        arrived = _moved(gradients[0][ctx.order], *ctx.way)
        found: torch.Tensor = _ATEN.embedding_backward.default(arrived, ctx.requested, *ctx.form)
        return found, None


def _check(ids: torch.Tensor, size: int, inside: bool) -> None:
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
