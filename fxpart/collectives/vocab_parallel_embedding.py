"""Row-sharded embedding tables: each rank looks up its own rows, and results are Partial.

Megatron-LM's vocabulary-parallel embedding (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from typing import Any

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.factor_shares import Axes, make_unsupported_form_error, span

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
    """Run ``aten.embedding`` on this rank's rows, with zeros for other rows (Partial).

    sparse: the gradient contains only the looked-up rows of this rank. Raise FXP108 for gradients
    scaled by index frequency.
    """
    _refuse("embedding_rows", scale_grad_by_freq)
    start, rows = span(mesh, axes, size)
    if (
        rows == 0 and not sparse
    ):  # keep the dependence on the weight, so that all ranks have a gradient
        return weight.new_zeros([*indices.shape, weight.shape[1]]) + weight.sum()
    padding = padding_idx - start if start <= padding_idx < start + rows else _NONE
    ids, outside = _own(indices, start, rows)
    if sparse and not mesh.fake:
        here = torch.nonzero(~outside.reshape(-1)).squeeze(1)
        own: torch.Tensor = _ATEN.embedding.default(
            weight, ids.reshape(-1)[here], padding, False, True
        )
        whole = own.new_zeros(outside.numel(), weight.shape[1]).index_copy(0, here, own)
        return whole.view(*indices.shape, weight.shape[1])
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
    """Run ``aten.embedding_bag`` on this rank's rows: bags Partial, other results Replicate.

    Supports sums, with per-sample weights, and means. sparse: as in :func:`embedding_rows`. Raise
    FXP108 for maxima and scaled gradients.
    """
    _refuse("embedding_bag_rows", scale_grad_by_freq)
    if mode == _MAX:
        raise make_unsupported_form_error(
            "embedding_bag_rows", "the maximum of a bag needs all of its rows"
        )
    padding = _NONE if padding_idx is None else padding_idx
    start, rows = span(mesh, axes, size)
    with torch.no_grad():
        bag_indices = compute_bag_indices(
            weight, size, indices, offsets, mode, per_sample_weights, include_last_offset, padding
        )
        counted = torch.ones_like(indices, dtype=weight.dtype)
        if padding != _NONE:
            counted = counted.masked_fill(indices == padding, 0)
        ids, outside = _own(indices, start, max(rows, 1))
    if sparse and not mesh.fake:
        bags = _own_bags(
            weight, ids, ~outside & (counted > 0) & (rows > 0), offsets, per_sample_weights,
            include_last_offset,
        )  # fmt: skip
        return _averaged(bags, counted, offsets, mode, include_last_offset), *bag_indices[1:]
    weights = counted if per_sample_weights is None else per_sample_weights * counted
    if rows == 0:
        weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        outside = torch.ones_like(outside)
    bags = _ATEN.embedding_bag.default(
        weight, ids, offsets, False, _SUM, False, weights.masked_fill(outside, 0),
        include_last_offset,
    )[0]  # fmt: skip
    return _averaged(bags, counted, offsets, mode, include_last_offset), *bag_indices[1:]


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
    """Run ``aten.embedding_bag`` on this rank's bags; offsets are relative to its first index."""
    found: Bags = _ATEN.embedding_bag.padding_idx(
        weight, indices, offsets - offsets[:1], scale_grad_by_freq, mode, sparse,
        per_sample_weights, include_last_offset, None if padding_idx == _NONE else padding_idx,
    )  # fmt: skip
    bags, bag_of, sizes, largest = found
    first: torch.Tensor = bag_of + span(mesh, axes, size)[0]  # type: ignore[assignment]
    return bags, first, sizes, largest


def embedding_bag_bags_rows(
    mesh: Communicator,
    axes: tuple[Axes, Axes],
    size: tuple[Size, Size],
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> Bags:
    """Run ``aten.embedding_bag`` on this rank's bags and rows; the bags are Partial."""
    offsets = offsets - offsets[:1]
    bags, bag_of, sizes, largest = embedding_bag_rows(
        mesh, axes[1], size[1], weight, indices, offsets, *rest, **named
    )
    first: torch.Tensor = bag_of + span(mesh, axes[0], size[0])[0]  # type: ignore[assignment]
    return bags, first, sizes, largest


def compute_bag_indices(
    weight: torch.Tensor,
    size: Size,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    mode: int,
    weights: torch.Tensor | None,
    last: bool,
    padding: int | None,
) -> Bags:
    """Return the op's additional results, from a table of ``size`` rows that uses no memory."""
    table = weight.new_zeros(1, 1).expand(size, 1).detach()
    table.requires_grad_(weight.requires_grad)  # ATen returns other results without it
    like = None if weights is None else torch.ones_like(weights)
    found: Bags = _ATEN.embedding_bag.padding_idx(
        table, indices, offsets, False, mode, False, like, last,
        None if padding == _NONE else padding,
    )  # fmt: skip
    return found


def _own_bags(
    weight: torch.Tensor,
    ids: torch.Tensor,
    there: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    last: bool,
) -> torch.Tensor:
    """Return sums of bags over the ids in ``there``, so that no other row has a gradient."""
    before = torch.cat([offsets.new_zeros(1), there.cumsum(0).to(offsets.dtype)])
    some = None if weights is None else weights[there]
    found: torch.Tensor = _ATEN.embedding_bag.default(
        weight, ids[there], before[offsets], False, _SUM, True, some, last
    )[0]
    return found


def _averaged(
    bags: torch.Tensor, counted: torch.Tensor, offsets: torch.Tensor, mode: int, last: bool
) -> torch.Tensor:
    """Return the sums of bags, or their means over the counted indices."""
    if mode != _MEAN:
        return bags
    return bags / _bag_counts(counted, offsets, last).clamp(min=1).unsqueeze(-1)


def _own(indices: torch.Tensor, start: Size, rows: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local row numbers (0 for other ranks' rows), and a mask of other ranks' rows."""
    local = indices - start  # type: ignore[operator]
    outside = (local < 0) | (local >= rows)
    return local.masked_fill(outside, 0), outside


def _bag_counts(counted: torch.Tensor, offsets: torch.Tensor, last: bool) -> torch.Tensor:
    """Return the number of counted indices per bag."""
    sums = torch.cat([counted.new_zeros(1), counted.cumsum(0)])
    ends = torch.cat([offsets, offsets.new_full((1,), counted.shape[0])]) if not last else offsets
    return sums[ends[1:]] - sums[ends[:-1]]


def _refuse(form: str, scaled: bool) -> None:
    if scaled:
        raise make_unsupported_form_error(
            form, "gradients scaled by frequency need the indices of all ranks"
        )
