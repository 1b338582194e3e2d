"""Regions: copies and covers against the numbers of their elements, one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from checkpoint_files import indices, part, split
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.checkpoint.manifest import ManifestPart, ManifestTensor
from fxpart.checkpoint.manifest_check import find_coverage_fault
from fxpart.checkpoint.regions import TensorRegion, copy_overlap, make_full_region, overlap


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorRegion:
    dims = []
    for size in shape:
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
        dims.append(tuple(zip(ends[::2], ends[1::2], strict=False)))
    region = TensorRegion(tuple(dims))
    if draw(st.booleans()):
        ends = sorted(draw(st.tuples(*[st.integers(0, region.elements)] * 2)))
        return TensorRegion(region.ranges, (ends[0], ends[1]))
    return region


@pytest.mark.slow
@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=4).map(tuple))
@settings(max_examples=400, deadline=None)
def test_a_copy_moves_what_both_hold_and_nothing_else(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    wanted, held = data.draw(regions(shape)), data.draw(regions(shape))
    assert not wanted.fault(shape)
    tensor = np.random.default_rng(0).integers(1, 256, (*shape, 3), dtype=np.uint8)
    source = np.ascontiguousarray(part(tensor, held))
    target = np.zeros((*wanted.sizes, 3), np.uint8)
    both = np.isin(indices(wanted, shape), indices(held, shape))
    assert copy_overlap(target, wanted, source, held) == both.sum() == overlap(wanted, held)
    expected = np.where(both[..., None], part(tensor, wanted), 0)
    assert (target == expected).all()


def test_many_ranges_in_two_dims() -> None:
    """Then a copy goes through indices."""
    shape = (90, 70)
    tensor = np.random.default_rng(1).integers(1, 256, (*shape, 4), dtype=np.uint8)
    odd = TensorRegion(
        (tuple((i, i + 1) for i in range(1, 90, 2)), tuple((i, i + 2) for i in range(0, 69, 3)))
    )
    target = np.zeros((*odd.sizes, 4), np.uint8)
    assert copy_overlap(target, odd, tensor, make_full_region(shape)) == odd.elements
    assert (target == part(tensor, odd)).all()


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), shape=st.lists(st.integers(0, 6), max_size=3).map(tuple))
@settings(max_examples=200, deadline=None)
def test_what_is_split_is_covered_and_less_or_more_is_not(
    seed: int, shape: tuple[int, ...]
) -> None:
    draw = random.Random(seed)
    parts = split(shape, draw)
    assert not find_coverage_fault(tensor(shape, parts))
    count = np.zeros(int(np.prod(shape, dtype=int)), int)
    for region in parts:
        count[indices(region, shape).reshape(-1)] += 1
    assert (count == 1).all()
    some = [region for region in parts if region.elements]
    if some:
        lost = draw.choice(some)
        assert find_coverage_fault(tensor(shape, [r for r in parts if r is not lost]))
        assert find_coverage_fault(tensor(shape, [*parts, lost]))


@pytest.mark.slow
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
@settings(max_examples=300, deadline=None)
def test_any_parts_are_covered_as_counting_says(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    parts = data.draw(st.lists(regions(shape), min_size=1, max_size=5))
    count = np.zeros(int(np.prod(shape)), int)
    for region in parts:
        np.add.at(count, indices(region, shape).reshape(-1), 1)
    assert (find_coverage_fault(tensor(shape, parts)) == "") == bool((count == 1).all())


def tensor(shape: tuple[int, ...], parts: list[TensorRegion]) -> ManifestTensor:
    made = tuple(
        ManifestPart("rank-00000.safetensors", "x", r.ranges, "0" * 64, r.flat) for r in parts
    )
    return ManifestTensor("float32", shape, made)


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (TensorRegion((((0, 5),),)), (4,)),
        (TensorRegion((((0, 2), (1, 3)),)), (4,)),
        (TensorRegion((((2, 1),),)), (4,)),
        (TensorRegion((((-1, 1),),)), (4,)),
        (TensorRegion((((0, 4),),), (0, 5)), (4,)),
        (TensorRegion((((0, 4),),), (3, 2)), (4,)),
        (TensorRegion((((0, 4),), ((0, 1),))), (4,)),
    ],
)
def test_what_is_no_region_of_a_shape(region: TensorRegion, shape: tuple[int, ...]) -> None:
    assert region.fault(shape)
