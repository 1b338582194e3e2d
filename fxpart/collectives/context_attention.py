"""Causal attention of some rows of the sequence on all keys: the local part of context parallelism.

A rank has blocks of consecutive queries and the keys and values of the whole sequence. A block
reads the keys before it entirely and its own keys up to each query; both parts run in a fused
kernel, and are combined by their logsumexp (as in ring attention, Liu et al., ICLR 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

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
) -> torch.Tensor:
    """Return causal ``aten.scaled_dot_product_attention`` of this rank's queries on all keys.

    size: number of queries of all ranks. query: [batch, heads, queries, width]; key and value:
    [batch, heads or groups of heads, keys, width].
    """
    if not is_causal or attn_mask is not None or dropout_p:
        raise make_unsupported_form_error("attention_rows", "it is not plain causal attention")
    start, _ = span(mesh, axes, size)
    width = query.shape[-1]
    factor = 1 / math.sqrt(width) if scale is None else scale
    found: torch.Tensor = torch.ops.fxpart.attention_rows(query, key, value, [start], factor)[0]
    return found


@torch.library.custom_op("fxpart::attention_rows", mutates_args=())
def run_attention_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the logsumexp of each query.

    starts: the number of the first query of each block in the sequence; blocks have equal lengths.
    """
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    sums = query.new_empty(query.shape[:-1], dtype=_sum_dtype(query))
    heads, groups = query.shape[-3], key.shape[-3]
    for rows, start in _list_blocks(query, starts):
        own = slice(start, start + rows.stop - rows.start)
        block = query[..., rows, :]
        keys, values = (_repeat(t[..., own, :], heads) for t in (key, value))
        found = attend(block, keys, values, scale, is_causal=True)
        if start:
            earlier = attend(
                _join_heads(block, groups), key[..., :start, :], value[..., :start, :], scale,
                is_causal=False,
            )  # fmt: skip
            found = _combine(found, _part_heads(earlier, heads))
        output[..., rows, :], sums[..., rows] = found
    return output, sums


@run_attention_rows.register_fake
def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output, query.new_empty(query.shape[:-1], dtype=_sum_dtype(query))


@torch.library.custom_op("fxpart::attention_rows_backward", mutates_args=())
def run_attention_rows_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    starts: Sequence[int],
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
        if start:
            found = attend_backward(
                *(_join_heads(t, groups) for t in (grad, block)),
                key[..., :start, :], value[..., :start, :],
                AttentionPart(_join_heads(whole.output, groups), whole.logsumexp.reshape(
                    *key.shape[:-2], -1
                )), scale, is_causal=False,
            )  # fmt: skip
            of_query[..., rows, :] += found[0].reshape(block.shape)
            of_key[..., :start, :] += found[1]
            of_value[..., :start, :] += found[2]
    return of_query, of_key, of_value


@run_attention_rows_backward.register_fake
def _fake_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    starts: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.starts, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    found = torch.ops.fxpart.attention_rows_backward(
        gradient, *ctx.saved_tensors, ctx.starts, ctx.scale
    )
    return *found, None, None


run_attention_rows.register_autograd(_differentiate, setup_context=_keep)


def _list_blocks(query: torch.Tensor, starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield the local rows of each block, and the number of its first query in the sequence."""
    length = query.shape[-2] // len(starts)
    for index, start in enumerate(starts):
        yield slice(index * length, (index + 1) * length), start


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
    return gradient.unflatten(-3, (groups, heads // groups)).sum(-3)


def _join_heads(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [batch, groups, queries of all heads of the group, width]."""
    heads = tensor.shape[-3]
    return tensor.unflatten(-3, (groups, heads // groups)).flatten(-3, -2)


def _part_heads(part: AttentionPart, heads: int) -> AttentionPart:
    """Return the attention of [batch, heads, queries] from that of joined heads."""
    batch, groups = part.logsumexp.shape[:-2], part.logsumexp.shape[-2]
    each = part.logsumexp.shape[-1] * groups // heads
    return AttentionPart(
        part.output.reshape(*batch, heads, each, -1), part.logsumexp.reshape(*batch, heads, each)
    )


def _sum_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float32 if query.dtype.itemsize < 4 else query.dtype
