"""Causal attention of some rows of the sequence on all keys: the local part of context parallelism.

A rank has blocks of consecutive queries and the keys and values of the whole sequence. A block
reads the keys before it entirely and its own keys up to each query; both parts run in a fused
kernel, and are combined by their logsumexp (as in ring attention, Liu et al., ICLR 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.factor_shares import Axes, make_unsupported_form_error, span
from fxpart.compat import AttentionPart, attend, attend_backward


def attention_rows(
    mesh: Communicator,
    axes: Axes,
    size: Size,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    stripes: int = 1,
) -> torch.Tensor:
    """Return causal ``aten.scaled_dot_product_attention`` of this rank's queries on all keys.

    size: number of queries of all ranks. query: [batch, heads, queries, width]; key and value:
    [batch, heads or groups of heads, keys, width]. stripes: number of parts of the sequence of
    which this rank has an equal piece each; more of them balance the keys that ranks read.
    """
    if not is_causal or attn_mask is not None or dropout_p:
        raise make_unsupported_form_error("attention_rows", "it is not plain causal attention")
    stripe = size // stripes
    start, length = span(mesh, axes, stripe)
    if mesh.slowest:  # the last rank reads the most keys
        start = stripe - length
    starts = tuple(number * stripe + start for number in range(stripes))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    run = attend_rows if mesh.fake else _attend_rows_at_once
    found: torch.Tensor = _AttentionRows.apply(query, key, value, starts, factor, run)  # type: ignore[no-untyped-call]
    return found


class _AttentionRows(torch.autograd.Function):
    """Causal attention of blocks of queries; saves the output and the logsumexp of each query.

    run: :func:`attend_rows`, or one op, whose result selective recomputation can store.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: tuple[Size, ...],
        scale: float,
        run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        output, sums = run(query, key, value, starts, scale)
        ctx.how = starts, scale
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*attend_rows_backward(gradient, *ctx.saved_tensors, *ctx.how), None, None, None)


@torch.library.custom_op("fxpart::attend_rows", mutates_args=())
def _attend_rows_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :func:`attend_rows` as one op."""
    output, sums = attend_rows(query, key, value, starts, scale)
    return output, sums


@_attend_rows_at_once.register_fake
def _make_fake_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output = _make_output(query, value)
    return output, query.new_empty(query.shape[:-1], dtype=_sum_dtype(query))


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: Sequence[Size],
    scale: float,
) -> AttentionPart:
    """Return the attention of consecutive blocks of queries, which have equal lengths.

    starts: the number of the first query of each block in the sequence.
    """
    output = _make_output(query, value)
    sums = query.new_empty(query.shape[:-1], dtype=_sum_dtype(query))
    heads, groups = query.shape[-3], key.shape[-3]
    for rows, start in _list_blocks(query, starts):
        own = slice(start, start + rows.stop - rows.start)
        block = query[..., rows, :]
        keys, values = (_repeat(t[..., own, :], heads) for t in (key, value))
        found = attend(block, keys, values, scale, is_causal=True)
        if _is_positive(start):
            earlier = attend(
                _join_heads(block, groups), key[..., :start, :], value[..., :start, :], scale,
                is_causal=False,
            )  # fmt: skip
            found = _combine(found, _part_heads(earlier, heads))
        output[..., rows, :], sums[..., rows] = found
    return AttentionPart(output, sums)


def attend_rows_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    starts: Sequence[Size],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, and of all keys and values."""
    of_query = torch.empty_like(query)
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    heads, groups = query.shape[-3], key.shape[-3]
    for rows, start in _list_blocks(query, starts):
        own = slice(start, start + rows.stop - rows.start)
        block, grad = query[..., rows, :], gradient[..., rows, :]
        whole = AttentionPart(output[..., rows, :], sums[..., rows])
        keys, values = (_repeat(t[..., own, :], heads) for t in (key, value))
        found = attend_backward(grad, block, keys, values, whole, scale, is_causal=True)
        of_query[..., rows, :] = found[0]
        of_key[..., own, :] += _sum_groups(found[1], groups)
        of_value[..., own, :] += _sum_groups(found[2], groups)
        if _is_positive(start):
            joined = AttentionPart(
                _join_heads(whole.output, groups), whole.logsumexp.reshape(*key.shape[:-2], -1)
            )
            found = attend_backward(
                _join_heads(grad, groups), _join_heads(block, groups), key[..., :start, :],
                value[..., :start, :], joined, scale, is_causal=False,
            )  # fmt: skip
            of_query[..., rows, :] += found[0].reshape(block.shape)
            of_key[..., :start, :] += found[1]
            of_value[..., :start, :] += found[2]
    return of_query, of_key, of_value


def _make_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return an empty output whose heads are next to each other in memory, as of fused kernels."""
    *batch, heads, length, _ = query.shape
    return query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)


def _list_blocks(query: torch.Tensor, starts: Sequence[Size]) -> Iterator[tuple[slice, Size]]:
    """Yield the local rows of each block, and the number of its first query in the sequence."""
    length = query.shape[-2] // len(starts)
    for index, start in enumerate(starts):
        yield slice(index * length, (index + 1) * length), start


def _is_positive(start: Size) -> bool:
    return isinstance(start, torch.SymInt) or start > 0


def _combine(first: AttentionPart, second: AttentionPart) -> AttentionPart:
    """Return the attention on the keys of both parts."""
    sums = torch.logaddexp(first.logsumexp, second.logsumexp)
    total = first.output * (first.logsumexp - sums).exp_().unsqueeze(-1)
    total += second.output * (second.logsumexp - sums).exp_().unsqueeze(-1)
    return AttentionPart(total.to(first.output.dtype), sums)


def _repeat(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values for every head."""
    groups = tensor.shape[-3]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, -3)


def _sum_groups(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the sum over the heads that share keys."""
    heads = gradient.shape[-3]
    if heads == groups:
        return gradient
    found: torch.Tensor = gradient.unflatten(-3, (groups, heads // groups)).sum(-3)
    return found


def _join_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [batch, groups, queries of all heads of the group, width]."""
    heads = tensor.shape[-3]
    found: torch.Tensor = tensor.unflatten(-3, (groups, heads // groups)).flatten(-3, -2)
    return found


def _part_heads(part: AttentionPart, heads: int) -> AttentionPart:
    """Return the attention of [batch, heads, queries] from that of joined heads."""
    batch, groups = part.logsumexp.shape[:-2], part.logsumexp.shape[-2]
    each = part.logsumexp.shape[-1] * groups // heads
    return AttentionPart(
        part.output.reshape(*batch, heads, each, -1), part.logsumexp.reshape(*batch, heads, each)
    )


def _sum_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float32 if query.dtype.itemsize < 4 else query.dtype
