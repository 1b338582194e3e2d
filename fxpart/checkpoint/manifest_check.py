"""Consistency of a manifest with itself and with file headers, without reading tensors.

The parts of a tensor must contain each of its elements once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from fxpart.checkpoint import dtypes, files
from fxpart.checkpoint.manifest import (
    NAME,
    CheckpointManifest,
    ManifestPart,
    ManifestTensor,
    Ranges,
)
from fxpart.checkpoint.regions import TensorRegion, overlap
from fxpart.checkpoint.safetensors_header import SafetensorsEntry
from fxpart.errors import Problem

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HUGE = 1 << 62
# Parts that form no grid are compared pairwise, up to this number.
_MAX_PAIRWISE = 256


def manifest_problems(manifest: CheckpointManifest, folder: Path) -> Iterator[Problem]:
    """Yield invalid file names, dtypes, shapes, regions and digests."""
    for name, entry in manifest.files.items():
        if not files.is_name(name) or name == NAME:
            yield files.make_damage_problem(
                folder, files.format_key(name), "it is not a valid file name"
            )
        if entry.size < 0:
            yield files.make_damage_problem(
                folder, files.format_key(name), f"its size is {entry.size} bytes"
            )
    for key, tensor in manifest.tensors.items():
        why = _tensor_fault(tensor)
        if why:
            yield files.make_damage_problem(folder, files.format_key(key), why)
            continue
        for part in tensor.parts:
            why = _part_fault(part, tensor)
            if not why and part.file not in manifest.files:
                why = "the manifest does not list its file"
            if why:
                yield files.make_damage_problem(folder, format_place(key, part), why)


def header_problems(
    manifest: CheckpointManifest, folder: Path, found: Mapping[str, Mapping[str, SafetensorsEntry]]
) -> Iterator[Problem]:
    """Yield parts whose file headers differ from the manifest. found: headers by file."""
    for key, tensor in manifest.tensors.items():
        for part in tensor.parts:
            header = found.get(part.file, {}).get(part.name)
            if header is None:
                yield files.make_damage_problem(
                    folder, format_place(key, part), "it is missing in the file"
                )
                continue
            kind = dtypes.to_header_entry(tensor.dtype, TensorRegion(part.ranges, part.flat).sizes)
            if kind != header[:2]:
                found_type = f"{header.dtype} {list(header.shape)}"
                why = f"it is {found_type} in the file, {kind[0]} {list(kind[1])} in"
                yield files.make_damage_problem(
                    folder, format_place(key, part), f"{why} the manifest"
                )


def tensor_fault(tensor: ManifestTensor) -> str:
    """Return why a tensor or one of its parts is invalid, or ""."""
    faults = (_part_fault(part, tensor) for part in tensor.parts)
    return _tensor_fault(tensor) or next(filter(None, faults), "")


def format_place(key: str, part: ManifestPart) -> str:
    """Return ``optimizer/h.3.mlp.weight/exp_avg in rank-00002.safetensors``."""
    return f"{files.format_key(key)} in {files.format_key(part.file)}"


def _tensor_fault(tensor: ManifestTensor) -> str:
    if tensor.dtype not in dtypes.DTYPES:
        return f"its dtype is {files.format_key(tensor.dtype)[:40]}"
    # Before computing the product, which is slow for many large sizes.
    if len(tensor.shape) > 64 or not all(0 <= size < _HUGE for size in tensor.shape):
        return f"its shape is {str(tensor.shape[:8])[:80]}"
    return "" if math.prod(tensor.shape) < _HUGE else "its shape is too large"


def _part_fault(part: ManifestPart, tensor: ManifestTensor) -> str:
    if not _DIGEST.fullmatch(part.digest):
        return "its digest is invalid"
    return TensorRegion(part.ranges, part.flat).fault(tensor.shape)


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
