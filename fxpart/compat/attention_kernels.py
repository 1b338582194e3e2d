"""Fused attention with the logsumexp of each query, and its backward.

Uses the private ops ``_scaled_dot_product_flash_attention_for_cpu``,
``_scaled_dot_product_flash_attention`` and ``_scaled_dot_product_efficient_attention`` of
``torch.ops.aten`` with their backwards. Where they do not apply, products in chunks of queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_CHUNK = 256  # queries of one product where there is no kernel


class AttentionPart(NamedTuple):
    """The output of some queries on some keys, and the logsumexp of each query's scores.

    output: [batch, heads, queries, width]. logsumexp: [batch, heads, queries].
    """

    output: torch.Tensor
    logsumexp: torch.Tensor


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> AttentionPart:
    """Return softmax(scale * query @ key.T) @ value of [batch, heads, length, width] tensors.

    is_causal: query i reads keys 0 to i; there are as many keys as queries.
    """
    kernel = _find_kernel(query, value)
    query, key, value = map(_with_dense_rows, (query, key, value))
    if kernel == "cpu":
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, is_causal, scale=scale
        )
    elif kernel == "flash":
        found = _ATEN._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    elif kernel == "efficient":
        found = _ATEN._scaled_dot_product_efficient_attention.default(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        rows = query.shape[-2]  # this kernel pads the queries of its logsumexp
        return AttentionPart(found[0], found[1][..., :rows])
    else:
        return _attend_in_chunks(query, key, value, scale, is_causal)
    return AttentionPart(found[0], found[1])


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    whole: AttentionPart,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    whole: of these queries on all keys that they read, of which ``key`` may be a part.
    """
    kernel = _find_kernel(query, value)
    query, key, value, gradient = map(_with_dense_rows, (query, key, value, gradient))
    output, logsumexp = _with_dense_rows(whole.output), whole.logsumexp
    found: tuple[torch.Tensor, ...]
    if kernel == "cpu":
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient, query, key, value, output, logsumexp, 0.0, is_causal, scale=scale
        )
    elif kernel == "flash":
        unused = torch.empty((), dtype=torch.int64)  # of dropout
        found = _ATEN._scaled_dot_product_flash_attention_backward.default(
            gradient, query, key, value, output, logsumexp, None, None, query.shape[-2],
            key.shape[-2], 0.0, is_causal, unused, unused, scale=scale,
        )  # fmt: skip
    elif kernel == "efficient":
        unused = torch.empty((), dtype=torch.int64)
        padded = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % 32))
        found = _ATEN._scaled_dot_product_efficient_attention_backward.default(
            gradient, query, key, value, None, output, padded, unused, unused, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
    else:
        found = _differentiate_in_chunks(gradient, query, key, value, whole, scale, is_causal)
    return found[0], found[1], found[2]


def _with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the elements of a row next to each other, as all kernels assume.

    Torch's own attention checks this before it calls them; they do not.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _find_kernel(query: torch.Tensor, value: torch.Tensor) -> str:
    """Return the kernel that takes these tensors: "cpu", "flash", "efficient", or ""."""
    width = query.shape[-1]
    if width != value.shape[-1] or query.shape[-2] == 0:
        return ""
    if query.device.type == "cpu":
        return "cpu" if hasattr(_ATEN, "_scaled_dot_product_flash_attention_for_cpu") else ""
    if query.device.type != "cuda" or width % 8:
        return ""
    if query.dtype in _HALF and width <= 256 and _is_recent(query.device):
        return "flash"
    return "efficient" if query.dtype in (*_HALF, torch.float32) else ""


def _is_recent(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_in_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool
) -> AttentionPart:
    """Compute the attention with scores of at most ``_CHUNK`` queries at once."""
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    sums = query.new_empty(query.shape[:-1], dtype=_wide(query.dtype))
    for start in range(0, query.shape[-2], _CHUNK):
        rows = slice(start, start + _CHUNK)
        scores = _score(query[..., rows, :], key, scale, start, is_causal)
        sums[..., rows] = scores.logsumexp(-1)
        chances = (scores - sums[..., rows, None]).exp_()
        output[..., rows, :] = (chances @ value.to(scores.dtype)).to(query.dtype)
    return AttentionPart(output, sums)


def _differentiate_in_chunks(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    whole: AttentionPart,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of :func:`_attend_in_chunks`."""
    wide = _wide(query.dtype)
    of_query = torch.empty_like(query)
    of_key, of_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    for start in range(0, query.shape[-2], _CHUNK):
        rows = slice(start, start + _CHUNK)
        scores = _score(query[..., rows, :], key, scale, start, is_causal)
        chances = (scores - whole.logsumexp[..., rows, None]).exp_()
        grad, output = gradient[..., rows, :].to(wide), whole.output[..., rows, :].to(wide)
        of_value += chances.transpose(-2, -1) @ grad
        inner = grad @ value.to(wide).transpose(-2, -1) - (grad * output).sum(-1, keepdim=True)
        of_scores = chances * inner * scale
        of_query[..., rows, :] = (of_scores @ key.to(wide)).to(query.dtype)
        of_key += of_scores.transpose(-2, -1) @ query[..., rows, :].to(wide)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


def _score(
    query: torch.Tensor, key: torch.Tensor, scale: float, start: int, is_causal: bool
) -> torch.Tensor:
    """Return the scaled scores; hidden keys get -inf. start: number of the first query."""
    wide = _wide(query.dtype)
    scores: torch.Tensor = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(start)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype
