"""A manifest compared with itself and with the headers of its files: sizes only, no tensor read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fxpart.checkpoint import dtypes, files
from fxpart.checkpoint.headers import Place
from fxpart.checkpoint.manifest import NAME, Manifest, Part, Tensor
from fxpart.checkpoint.regions import Region
from fxpart.errors import Problem

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HUGE = 1 << 62


def manifest_problems(manifest: Manifest, folder: Path) -> Iterator[Problem]:
    """What the manifest says that cannot be: names of files, dtypes, shapes, regions, digests."""
    for name, entry in manifest.files.items():
        if not files.is_name(name) or name == NAME:
            yield files.damage(folder, files.shown(name), "it is no name of a file beside it")
        if entry.size < 0:
            yield files.damage(folder, files.shown(name), f"it has {entry.size} bytes")
    for key, tensor in manifest.tensors.items():
        why = _tensor_fault(tensor)
        if why:
            yield files.damage(folder, files.shown(key), why)
            continue
        for part in tensor.parts:
            why = _part_fault(part, tensor)
            if not why and part.file not in manifest.files:
                why = "the manifest does not list that file"
            if why:
                yield files.damage(folder, place(key, part), why)


def header_problems(
    manifest: Manifest, folder: Path, found: Mapping[str, Mapping[str, Place]]
) -> Iterator[Problem]:
    """Where a part is not in its file as the manifest says. found: the headers, by file."""
    for key, tensor in manifest.tensors.items():
        for part in tensor.parts:
            there = found.get(part.file, {}).get(part.name)
            if there is None:
                yield files.damage(folder, place(key, part), "it is not in the file")
                continue
            kind = dtypes.stored(tensor.dtype, Region(part.ranges, part.flat).sizes)
            if kind != there[:2]:
                why = f"it is {there.dtype} {list(there.shape)} there, {kind[0]} {list(kind[1])} in"
                yield files.damage(folder, place(key, part), f"{why} the manifest")


def tensor_fault(tensor: Tensor) -> str:
    """Why a tensor, or a part of it, is none; "" where all is well."""
    faults = (_part_fault(part, tensor) for part in tensor.parts)
    return _tensor_fault(tensor) or next(filter(None, faults), "")


def place(key: str, part: Part) -> str:
    """``optimizer/h.3.mlp.weight/exp_avg in rank-00002.safetensors``."""
    return f"{files.shown(key)} in {files.shown(part.file)}"


def _tensor_fault(tensor: Tensor) -> str:
    if tensor.dtype not in dtypes.DTYPES:
        return f"it is of dtype {files.shown(tensor.dtype)[:40]}"
    # Before their product is made, which would take long of many large ones.
    if len(tensor.shape) > 64 or not all(0 <= size < _HUGE for size in tensor.shape):
        return f"its shape is {str(tensor.shape[:8])[:80]}"
    return "" if math.prod(tensor.shape) < _HUGE else "its shape is too large"


def _part_fault(part: Part, tensor: Tensor) -> str:
    if not _DIGEST.fullmatch(part.digest):
        return "its digest is none"
    return Region(part.ranges, part.flat).fault(tensor.shape)
