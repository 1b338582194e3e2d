"""Local forms of ``fxpart.experts`` for experts sharded over several ranks.

``experts_cut``: every rank has all tokens (of its data-parallel shard) and computes the
contribution of its experts; the result is Partial. ``experts_dispatched``: the ranks that shard the
experts have different tokens; each token's row is sent to the ranks of its experts and back, by two
all-to-all with uneven parts, and two more in backward (GShard, Lepikhin et al., ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from fxpart.collectives.communicator import Communicator
from fxpart.collectives.experts import LOOP, ExpertWeights, apply_experts, experts
from fxpart.sharding import chunk


def owned(number: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range of experts of each rank of a group, as (first, last + 1).

    parts: sizes of the group's axes, major first; each axis shards what the previous one left.
    """
    pieces = [(0, number)]
    for count in parts:
        pieces = [
            (start + low, start + high)
            for start, stop in pieces
            for low, high in (chunk(stop - start, count, place) for place in range(count))
        ]
    return pieces


def experts_cut(
    mesh: Communicator,
    axes: tuple[str, ...],
    size: int,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *layers: Any,
) -> torch.Tensor:
    """Return the contribution of this rank's experts to hidden [T, H] of all ranks: [T, H].

    size: total number of experts. layers: local weights and the other ``fxpart.experts`` arguments.
    """
    if mesh.fake:
        return _assumed(mesh, axes, hidden, index, weights, layers)
    start, stop = owned(size, [mesh.size(axis) for axis in axes])[mesh.place(axes)]
    chosen = index.size(1)
    ids, order = torch.sort(index.reshape(-1))
    counts = torch.bincount(ids, minlength=size)
    numbers = counts.tolist()
    first, count = sum(numbers[:start]), sum(numbers[start:stop])
    mine = order.narrow(0, first, count)
    ends = torch.cumsum(counts[start:stop], dim=0, dtype=torch.int32)
    out = apply_experts(
        hidden[mine // chosen], ids.narrow(0, first, count) - start, ends, _layers(layers, count)
    )
    out = out * weights.reshape(-1)[mine].unsqueeze(-1)
    spread = out.new_zeros(order.size(0), out.size(1)).index_copy(0, mine, out)
    return spread.view(hidden.size(0), chosen, hidden.size(1)).sum(dim=1)


def experts_dispatched(
    mesh: Communicator,
    axes: tuple[str, ...],
    size: int,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    *layers: Any,
) -> torch.Tensor:
    """Run this rank's tokens hidden [T, H] through all ``size`` experts on the axes' ranks.

    layers: as in :func:`experts_cut`. The number of tokens may differ between ranks.
    """
    if mesh.fake:
        return _assumed(mesh, axes, hidden, index, weights, layers)
    ranges = owned(size, [mesh.size(axis) for axis in axes])
    start, stop = ranges[mesh.place(axes)]
    chosen = index.size(1)
    ids, order = torch.sort(index.reshape(-1))
    counts = torch.bincount(ids, minlength=size)
    received = mesh.start_all_to_all(
        counts, axes, [b - a for a, b in ranges], [stop - start] * len(ranges)
    ).wait()
    table = received.view(len(ranges), stop - start)
    sums = [0, *accumulate(counts.tolist())]
    give = [sums[b] - sums[a] for a, b in ranges]
    get = table.sum(1).tolist()
    rows: torch.Tensor = _ExpertAllToAll.apply(hidden[order // chosen], mesh, axes, give, get)  # type: ignore[no-untyped-call]
    # Rows arrive by rank, then by expert; the products need them by expert.
    local = torch.arange(stop - start, device=ids.device).repeat(len(ranges))
    local, sorting = torch.sort(
        local.repeat_interleave(received, output_size=sum(get)), stable=True
    )
    ends = torch.cumsum(table.sum(0), dim=0, dtype=torch.int32)
    out = apply_experts(rows[sorting], local, ends, _layers(layers, sum(get)))[_inverse(sorting)]
    home: torch.Tensor = _ExpertAllToAll.apply(out, mesh, axes, get, give)  # type: ignore[no-untyped-call]
    home = home * weights.reshape(-1)[order].unsqueeze(-1)
    return home[_inverse(order)].view(hidden.size(0), chosen, hidden.size(1)).sum(dim=1)


def _layers(layers: tuple[Any, ...], rows: int) -> ExpertWeights:
    """Return the experts' layers; use loops for zero rows, which some grouped products reject."""
    found = ExpertWeights(*layers)
    return found if rows else found._replace(product=LOOP)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse permutation."""
    place = torch.arange(order.size(0), device=order.device)
    return torch.empty_like(order).index_put((order,), place)


class _ExpertAllToAll(torch.autograd.Function):
    """Send rows to the ranks of the axes; gradients take the reverse path."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        mesh: Communicator,
        axes: tuple[str, ...],
        give: list[int],
        get: list[int],
    ) -> torch.Tensor:
        ctx.way = mesh, axes, get, give
        return _moved(rows, mesh, axes, give, get)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _moved(gradients[0], *ctx.way), None, None, None, None


def _moved(
    rows: torch.Tensor, mesh: Communicator, axes: tuple[str, ...], give: list[int], get: list[int]
) -> torch.Tensor:
    """Send ``give[i]`` rows to rank i; return the received rows in rank order."""
    width = rows.size(1)
    flat = mesh.start_all_to_all(
        rows.reshape(-1), axes, [n * width for n in give], [n * width for n in get]
    ).wait()
    return flat.view(sum(get), width)


def _assumed(
    mesh: Communicator,
    axes: tuple[str, ...],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    layers: tuple[Any, ...],
) -> torch.Tensor:
    """Return a result of the right shape if the routing is unknown."""
    return experts(hidden, index, weights, *layers)
