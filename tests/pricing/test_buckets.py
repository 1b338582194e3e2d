"""Bytes of buckets, against those that the runtime really packs."""

from __future__ import annotations

import random

import pytest
import torch

from fxpart.pricing import gradient_buckets
from fxpart.pricing.gradient_buckets import largest_bucket, list_buckets
from fxpart.pricing.stage_parallelism import StageParallelism
from fxpart.runtime.gradients import buckets as terms
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.gradients.buckets import PartialGradient
from fxpart.sharding import Mesh
from fxpart.solver.problem import Weight

MESH = Mesh.parse("dp=2")


def _weight(number: int, size: int) -> Weight:
    return Weight(
        name=f"w{number:03d}", blocks=(number,), weight=size, gradient=size, optimizer=0,
        buffer=False,
    )  # fmt: skip


def _packed(sizes: list[int]) -> int:
    """By the runtime's own buckets; one gradient alone is copied only for the flags behind it."""
    found = []
    for size in reversed(sizes):
        line = torch.empty(size // 4, device="meta")
        found.append(PartialGradient(line, line, ("dp",), "", size))
    packed = [b for b in terms.make_buckets(found) if len(b.terms) + bool(b.flags) > 1]
    return max((bucket.bytes for bucket in packed), default=0)


def test_limits_are_the_runtime_s() -> None:
    assert (gradient_buckets.BUCKET, gradient_buckets.FIRST) == (reduce_scatter.BUCKET, terms.FIRST)


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_bucket_is_the_one_that_the_runtime_packs(seed: int) -> None:
    draw = random.Random(seed)
    most = draw.choice([1 << 16, 1 << 22, 30 << 20])
    sizes = [4 * draw.randint(1, most // 4) for _ in range(draw.randint(1, 40))]
    state = [_weight(number, size) for number, size in enumerate(sizes)]
    sharing = StageParallelism(MESH, partial={weight.name: ("dp",) for weight in state})
    assert largest_bucket(state, sharing) == _packed(sizes)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("zero", [0, 1])
def test_a_stage_s_buckets_are_the_runtime_s(seed: int, zero: int) -> None:
    draw = random.Random(seed)
    sizes = [4 * draw.randint(1, 1 << draw.choice([12, 18, 22])) for _ in range(30)]
    state = [_weight(number, size) for number, size in enumerate(sizes)]
    axis = "dp" if zero else ""
    sharing = StageParallelism(
        MESH, partial={weight.name: ("dp",) for weight in state}, zero=zero, zero_axis=axis
    )
    found = []
    for size in reversed(sizes):
        line = torch.empty(size // 4, device="meta")
        found.append(PartialGradient(line, line, ("dp",), axis, size))
    made = [bucket for bucket in terms.make_buckets(found) if bucket.terms]
    listed = list_buckets(state, sharing)
    assert [sum(b.sizes.values()) for b in listed] == [b.bytes for b in made]
    copied = [bool(b.scattered) or len(b.terms) + bool(b.flags) > 1 for b in made]
    assert [b.copied for b in listed] == copied
    assert not any(b.copied for b in list_buckets(state, sharing, shared_memory=True)) or zero


def test_nothing_is_packed_where_nothing_is_summed() -> None:
    state = [_weight(0, 4000), _weight(1, 4000)]
    assert largest_bucket(state, StageParallelism(Mesh())) == 0
    assert largest_bucket(state, StageParallelism(MESH)) == 0, "equal on all lanes"
    assert largest_bucket([], StageParallelism(MESH)) == 0
    alone = StageParallelism(MESH, partial={"w000": ("dp",)})
    assert largest_bucket(state, alone) == 4000, "the other is no sum"
