"""Whether the parts of a tensor hold each of its elements once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

from fxpart.checkpoint.manifest import ManifestTensor, Ranges
from fxpart.checkpoint.regions import TensorRegion, overlap

# Of parts that are no grid each pair is compared.
_MOST = 256


def find_coverage_fault(tensor: ManifestTensor) -> str:
    """Why the parts do not cover the tensor once; "" where they do.

    The parts have to be regions of the tensor. Those that hold none of its elements do not count.
    """
    regions = [TensorRegion(part.ranges, part.flat) for part in tensor.parts]
    held = sum(region.elements for region in regions)
    if held != math.prod(tensor.shape):
        return f"its parts hold {held} of {math.prod(tensor.shape)} elements"
    boxes: dict[tuple[Ranges, ...], list[TensorRegion]] = {}
    for region in regions:
        if region.elements:
            boxes.setdefault(region.ranges, []).append(region)
    if any(_twice(_flats(same)) for same in boxes.values()):
        return "two of its parts hold the same elements"
    if len(boxes) == 1 or all(_grid(dim) for dim in zip(*boxes, strict=True)):
        return ""
    if len(boxes) > _MOST:
        return f"it has {len(boxes)} parts that form no grid"
    for some, others in combinations(boxes.values(), 2):
        if any(overlap(one, other) for one in some for other in others):
            return "two of its parts hold the same elements"
    return ""


def _flats(same: Sequence[TensorRegion]) -> list[tuple[int, int]]:
    """Of regions with the same box, the elements of it that each holds."""
    return [r.flat if r.flat is not None else (0, r.elements) for r in same]


def _twice(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether two of the ranges have an element in common."""
    last = 0
    for start, stop in sorted(ranges):
        if start < last:
            return True
        last = max(last, stop)
    return False


def _grid(dim: Iterable[Ranges]) -> bool:
    """Whether what the boxes hold along a dim is the same, or has nothing in common."""
    return not _twice(each for ranges in set(dim) for each in ranges)
