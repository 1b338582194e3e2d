"""Consistency of a manifest with itself and with file headers, without reading tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fxpart.checkpoint import dtypes, files
from fxpart.checkpoint.manifest import NAME, CheckpointManifest, ManifestPart, ManifestTensor
from fxpart.checkpoint.regions import TensorRegion
from fxpart.checkpoint.safetensors_header import SafetensorsEntry
from fxpart.errors import Problem

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HUGE = 1 << 62


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
