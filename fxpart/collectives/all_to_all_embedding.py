"""Row-sharded embedding tables on batch axes: ids are sent to the rows' ranks, rows return.

Every rank sends each of its ids to the rank that stores the row and receives the row (GShard's
dispatch, as recommender systems shard their tables: Naumov et al., DLRM, 2019, section 4).
Gradients take the reverse path, one row per id, in rank order, so sums have the order of the whole
batch. Only requested rows are sent.
"""

from __future__ import annotations

import torch

from fxpart.collectives.communicator import Communicator
from fxpart.collectives.expert_parallel import _ExpertAllToAll, _inverse
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
    ends = torch.tensor([first + count for first, count in held], device=ids.device)
    owners, order = torch.sort(torch.bucketize(ids.contiguous(), ends, right=True), stable=True)
    counts = torch.bincount(owners, minlength=len(held))
    twos = [2] * len(held)
    give = counts.tolist()
    offered = torch.stack([counts, torch.full_like(counts, own)], 1).reshape(-1)
    received = mesh.start_all_to_all(offered, axes, twos, twos).wait().tolist()
    get, theirs = received[::2], received[1::2]
    requested = mesh.start_all_to_all(ids[order], axes, give, get).wait() - start
    inside = start <= padding < start + length
    rows: torch.Tensor = _ATEN.embedding.default(
        weight, requested, padding - start if inside else _NONE, False, sparse
    )
    home: torch.Tensor = _ExpertAllToAll.apply(rows, mesh, axes, get, give)  # type: ignore[no-untyped-call]
    return home[_inverse(order)], sum(theirs[: mesh.place(axes)])


def _assumed(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return a result of the right shape if the ids are unknown."""
    return _ATEN.embedding.default(weight, indices)  # type: ignore[no-any-return]
