"""Causal attention of some rows on all keys, against attention of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from fxpart.costmodels.contractions import flops
from fxpart.passes.rules.outer_parts import divide_parts, multiply_parts

from fxpart.collectives.context_attention import attend_rows, attend_rows_backward
from fxpart.compat import attention_kernels
from fxpart.costs import OpSpec, TensorSpec
from fxpart.sharding import Shard
from fxpart.sharding.placement import parse_placement

ERRORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("kernel", [True, False])
def test_blocks_of_rows(
    dtype: torch.dtype, groups: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients, by torch's kernels and without, for shared keys too."""
    if not kernel:
        monkeypatch.setattr(attention_kernels, "_find_kernel", lambda *_: "")
    torch.manual_seed(0)
    tokens, parts = 24, 4
    query = torch.randn(2, 4, tokens, 8, dtype=dtype, requires_grad=True)
    key, value = (
        torch.randn(2, groups, tokens, 8, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    gradient = torch.randn_like(whole)
    wanted = torch.autograd.grad(whole, (query, key, value), gradient)
    length, sums = tokens // (2 * parts), [torch.zeros_like(key), torch.zeros_like(value)]
    for part in range(parts):
        starts = (part * length, tokens // 2 + part * length)
        rows = torch.cat([torch.arange(start, start + length) for start in starts])
        mine = query.detach()[:, :, rows]
        with torch.no_grad():
            output, lse = attend_rows(mine, key, value, starts, 0.3)
            found = attend_rows_backward(
                gradient[:, :, rows], mine, key, value, output, lse, starts, 0.3
            )
        torch.testing.assert_close(output, whole[:, :, rows], atol=ERRORS[dtype], rtol=0)
        torch.testing.assert_close(found[0], wanted[0][:, :, rows], atol=ERRORS[dtype], rtol=0)
        sums = [total + more for total, more in zip(sums, found[1:], strict=True)]
    for total, want in zip(sums, wanted[1:], strict=True):
        torch.testing.assert_close(total, want, atol=2 * ERRORS[dtype], rtol=0)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("stripes", [1, 2, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_of_the_last_rows(parts: int, stripes: int, backward: bool) -> None:
    """In the unit in which the whole attention counts all pairs of queries and keys."""
    tokens, width = 32, 8

    def spec(name: str, rows: int) -> OpSpec:
        shapes = ((1, 2, rows, width), (1, 2, tokens, width), (1, 2, tokens, width))
        inputs = tuple(TensorSpec(shape, "float32") for shape in shapes)
        return OpSpec(name, inputs, inputs[:1], (("stripes", stripes),), gradients=3)

    rows, stripe = tokens // parts, tokens // stripes
    last = [end - rows // stripes + i for end in range(stripe, tokens + 1, stripe)
            for i in range(rows // stripes)]  # fmt: skip
    pairs = sum(row + 0.5 for row in last)  # half of a masked diagonal
    whole = flops(spec("aten.scaled_dot_product_attention.default", tokens), backward)
    found = flops(spec("aten.attention_rows", rows), backward)
    assert found == pytest.approx(whole * pairs / (tokens * tokens / 2))
    assert found * parts / whole == pytest.approx(1 + (parts - 1) / (parts * stripes))


def test_symbolic_parts() -> None:
    """Products and quotients of numbers of parts with a symbol, and their text in placements."""
    assert multiply_parts(2, "s0") == "2*s0"
    assert multiply_parts("2*s0", 3) == "6*s0"
    assert multiply_parts("s0", "s1") is None
    assert divide_parts("6*s0", 3) == "2*s0"
    assert divide_parts("6*s0", "s0") == 6
    assert divide_parts("s0", "s1") is None
    assert parse_placement("S(0,2*s0)") == Shard(0, "2*s0")
    assert str(Shard(1, "s0")) == "S(1,s0)"
