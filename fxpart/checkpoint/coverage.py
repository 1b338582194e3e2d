"""Check that the parts of a tensor contain each of its elements once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

from fxpart.checkpoint.manifest import ManifestTensor, Ranges
from fxpart.checkpoint.regions import TensorRegion, overlap

# Parts that form no grid are compared pairwise, up to this number.
_MAX_PAIRWISE = 256


def find_coverage_fault(tensor: ManifestTensor) -> str:
    """Return why the parts do not cover the tensor exactly once, or "".

    The parts must be regions of the tensor. Empty parts are ignored.
    """
    regions = [TensorRegion(part.ranges, part.flat) for part in tensor.parts]
    contained = sum(region.elements for region in regions)
    if contained != math.prod(tensor.shape):
        return f"its parts contain {contained} of {math.prod(tensor.shape)} elements"
    boxes: dict[tuple[Ranges, ...], list[TensorRegion]] = {}
    for region in regions:
        if region.elements:
            boxes.setdefault(region.ranges, []).append(region)
    if any(_overlaps(_get_flat_ranges(regions_)) for regions_ in boxes.values()):
        return "two of its parts overlap"
    if len(boxes) == 1 or all(_forms_grid(dim) for dim in zip(*boxes, strict=True)):
        return ""
    if len(boxes) > _MAX_PAIRWISE:
        return f"it has {len(boxes)} parts that form no grid"
    for some, others in combinations(boxes.values(), 2):
        if any(overlap(one, other) for one in some for other in others):
            return "two of its parts overlap"
    return ""


def _get_flat_ranges(regions_: Sequence[TensorRegion]) -> list[tuple[int, int]]:
    """Return the flat ranges of regions with the same box."""
    return [r.flat if r.flat is not None else (0, r.elements) for r in regions_]


def _overlaps(ranges: Iterable[tuple[int, int]]) -> bool:
    """Return whether two of the ranges overlap."""
    last = 0
    for start, stop in sorted(ranges):
        if start < last:
            return True
        last = max(last, stop)
    return False


def _forms_grid(dim: Iterable[Ranges]) -> bool:
    """Return whether the boxes' ranges along a dim are equal or disjoint."""
    return not _overlaps(each for ranges in set(dim) for each in ranges)
