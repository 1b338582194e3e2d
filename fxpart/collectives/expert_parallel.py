"""Mixtures of experts whose experts lie on several lanes: the local forms of ``fxpart.experts``.

Two ways. ``experts_cut``: every lane has all the tokens (of its data-parallel share) and computes
what its experts add; the result is Partial. ``experts_dispatched``: the lanes that share the
experts have different tokens; each token's row travels to the lanes of its experts and back, by
two all-to-all of uneven parts, as many in the backward (GShard, Lepikhin et al., ICLR 2021).
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
    """First and last + 1 of the experts that each lane of a group holds.

    parts: the sizes of the group's axes, major first; every axis cuts what the one before left.
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
    """What this lane's experts of all ``size`` add to hidden [T, H], which all lanes hold: [T, H].

    layers: the local weights and the rest of ``fxpart.experts``' arguments.
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
    """This lane's tokens hidden [T, H] through all ``size`` experts, which lie on the axes' lanes.

    layers: as in :func:`experts_cut`. The number of tokens may differ from lane to lane.
    """
    if mesh.fake:
        return _assumed(mesh, axes, hidden, index, weights, layers)
    ranges = owned(size, [mesh.size(axis) for axis in axes])
    start, stop = ranges[mesh.place(axes)]
    chosen = index.size(1)
    ids, order = torch.sort(index.reshape(-1))
    counts = torch.bincount(ids, minlength=size)
    heard = mesh.start_all_to_all(
        counts, axes, [b - a for a, b in ranges], [stop - start] * len(ranges)
    ).wait()
    table = heard.view(len(ranges), stop - start)
    sums = [0, *accumulate(counts.tolist())]
    give = [sums[b] - sums[a] for a, b in ranges]
    get = table.sum(1).tolist()
    rows: torch.Tensor = _ExpertAllToAll.apply(hidden[order // chosen], mesh, axes, give, get)  # type: ignore[no-untyped-call]
    # they come by lane, and by expert within each; the products want them by expert
    local = torch.arange(stop - start, device=ids.device).repeat(len(ranges))
    local, sorting = torch.sort(local.repeat_interleave(heard, output_size=sum(get)), stable=True)
    ends = torch.cumsum(table.sum(0), dim=0, dtype=torch.int32)
    out = apply_experts(rows[sorting], local, ends, _layers(layers, sum(get)))[_inverse(sorting)]
    home: torch.Tensor = _ExpertAllToAll.apply(out, mesh, axes, get, give)  # type: ignore[no-untyped-call]
    home = home * weights.reshape(-1)[order].unsqueeze(-1)
    return home[_inverse(order)].view(hidden.size(0), chosen, hidden.size(1)).sum(dim=1)


def _layers(layers: tuple[Any, ...], rows: int) -> ExpertWeights:
    """The experts' layers; where no row comes, in loops: not every grouped product takes none."""
    found = ExpertWeights(*layers)
    return found if rows else found._replace(product=LOOP)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order``."""
    place = torch.arange(order.size(0), device=order.device)
    return torch.empty_like(order).index_put((order,), place)


class _ExpertAllToAll(torch.autograd.Function):
    """Rows to the lanes of the axes; the gradients come back the same way."""

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
    """``give[i]`` rows to lane i, one after another; what comes, in order of lanes."""
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
    """Shapes where nobody knows the routing: the result's."""
    return experts(hidden, index, weights, *layers)
