"""Embedding tables cut by rows: each lane answers for its own, and the results are Partial.

Megatron-LM's vocabulary-parallel embedding (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.shares import Axes, refused, span

_ATEN = torch.ops.aten
_NONE = -1  # "no padding index", as aten.embedding has it
_SUM, _MEAN, _MAX = 0, 1, 2  # modes of bags

Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def embedding_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = _NONE,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """``aten.embedding`` of the rows that this lane holds, zeros for others' (Partial).

    FXP108 for sparse gradients and for gradients scaled by how often a row was asked for.
    """
    _refuse("embedding_rows", sparse, scale_grad_by_freq)
    start, rows = span(mesh, axes, size)
    if rows == 0:  # keep the tie to the weight: all lanes have a gradient or none has
        return weight.new_zeros([*indices.shape, weight.shape[1]]) + weight.sum()
    ids, outside = _own(indices, start, rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else _NONE
    found: torch.Tensor = _ATEN.embedding.default(weight, ids, padding)
    return found.masked_fill(outside.unsqueeze(-1), 0)


def embedding_bag_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = _NONE,
) -> Bags:
    """``aten.embedding_bag``: bags of the rows that this lane holds (Partial); the rest Replicate.

    Sums, with weights of samples, and means. FXP108 for maxima, sparse and scaled gradients.
    """
    _refuse("embedding_bag_rows", sparse, scale_grad_by_freq)
    if mode == _MAX:
        raise refused("embedding_bag_rows", "the maximum of a bag needs all of its rows")
    padding = _NONE if padding_idx is None else padding_idx
    start, rows = span(mesh, axes, size)
    with torch.no_grad():
        # what the op tells beside the bags, from a table of no size
        table = weight.new_zeros(1, 1).expand(size, 1).detach()
        table.requires_grad_(weight.requires_grad)  # ATen tells more where it does not
        like = None if per_sample_weights is None else torch.ones_like(per_sample_weights)
        told: Bags = _ATEN.embedding_bag.padding_idx(
            table, indices, offsets, False, mode, False, like, include_last_offset,
            None if padding == _NONE else padding,
        )  # fmt: skip
        counted = torch.ones_like(indices, dtype=weight.dtype)
        if padding != _NONE:
            counted = counted.masked_fill(indices == padding, 0)
        ids, outside = _own(indices, start, max(rows, 1))
    weights = counted if per_sample_weights is None else per_sample_weights * counted
    if rows == 0:
        weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        outside = torch.ones_like(outside)
    bags: torch.Tensor = _ATEN.embedding_bag.default(
        weight, ids, offsets, False, _SUM, False, weights.masked_fill(outside, 0),
        include_last_offset,
    )[0]  # fmt: skip
    if mode == _MEAN:
        bags = bags / _bag_counts(counted, offsets, include_last_offset).clamp(min=1).unsqueeze(-1)
    return bags, *told[1:]


def embedding_bag_bags(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = _NONE,
) -> Bags:
    """``aten.embedding_bag`` of this lane's bags and their indices; offsets from its first."""
    found: Bags = _ATEN.embedding_bag.padding_idx(
        weight, indices, offsets - offsets[:1], scale_grad_by_freq, mode, sparse,
        per_sample_weights, include_last_offset, None if padding_idx == _NONE else padding_idx,
    )  # fmt: skip
    bags, bag_of, sizes, largest = found
    first: torch.Tensor = bag_of + span(mesh, axes, size)[0]  # type: ignore[assignment]
    return bags, first, sizes, largest


def _own(indices: torch.Tensor, start: Size, rows: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Local row numbers (0 for others') and where the rows are others'."""
    local = indices - start  # type: ignore[operator]
    outside = (local < 0) | (local >= rows)
    return local.masked_fill(outside, 0), outside


def _bag_counts(counted: torch.Tensor, offsets: torch.Tensor, last: bool) -> torch.Tensor:
    """How many indices of each bag count."""
    sums = torch.cat([counted.new_zeros(1), counted.cumsum(0)])
    ends = torch.cat([offsets, offsets.new_full((1,), counted.shape[0])]) if not last else offsets
    return sums[ends[1:]] - sums[ends[:-1]]


def _refuse(form: str, sparse: bool, scaled: bool) -> None:
    if sparse:
        raise refused(form, "sparse gradients of a table that is cut by rows are not summed")
    if scaled:
        raise refused(form, "gradients scaled by frequency need the indices of all ranks")
