"""Read tensors from safetensors files, one at a time into separate memory.

Files are read, not mapped: pages of a mapped file count as process memory while the file is open,
so a rank would need twice the memory for its part.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fxpart.checkpoint import safetensors_header
from fxpart.checkpoint.dtypes import NAMES
from fxpart.checkpoint.safetensors_index import INDEX, parse_index
from fxpart.errors import FxpartError, Problem, quoted, short
from fxpart.files import open_regular_file, read_bytes

_LARGEST = 100_000_000  # bytes of an index
_CHUNK = 1 << 22  # bytes per read of a tensor sharded along an inner dim


@dataclass(frozen=True)
class _TensorFileEntry:
    """Location of one tensor. start: its first byte in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFiles:
    """The tensors of one ``.safetensors`` file or of a folder.

    In a folder, these are the files that ``model.safetensors.index.json`` lists, or all files. Only
    headers are read until a tensor is requested. Raise FXP110 if there is no file, if one is
    damaged, if two have a tensor of the same name, or if a listed tensor is missing.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the headers."""
        path = Path(path)
        problems: list[Problem] = []
        index = _index(path / INDEX) if path.is_dir() else {}
        files = [path]
        if path.is_dir():
            listed = sorted({path / name for name in index.values()})
            files = listed or sorted(path.glob("*.safetensors"))
        if not files:
            raise _fault(path, "the folder contains no .safetensors file")
        self._entries: dict[str, _TensorFileEntry] = {}
        self._open: dict[Path, BinaryIO] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        for file in files:
            try:
                found = _header(file)
            except (OSError, ValueError) as cause:
                problems.extend(_fault(file, f"it cannot be read: {cause}").problems)
                continue
            for name, entry in found.items():
                if name in self._entries:
                    problems.extend(_fault(file, f"{short(name)} is also in another file").problems)
                self._entries[name] = entry
        lost = [name for name in index if name not in self._entries]
        if lost and not problems:
            why = f"it lists {len(lost)} tensors that no file contains, such as {short(lost[0])}"
            problems.extend(_fault(path / INDEX, why).problems)
        if problems:
            raise FxpartError(problems)

    def names(self) -> Collection[str]:
        """Return all names in all files."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, from the header."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor, from the header."""
        return self._entries[name].dtype

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in memory of its own."""
        entry = self._entries[name]
        return self._rows(entry, 0, math.prod(entry.shape), entry.shape)

    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a range of each dim of one tensor, on the CPU, with little extra memory.

        Along the first dim only the range is read; along other dims whole rows are read in chunks.
        """
        entry = self._entries[name]
        if not slices or not all(entry.shape):
            return self.read(name)
        bounds = [part.indices(size)[:2] for part, size in zip(slices, entry.shape, strict=True)]
        first, last = bounds[0]
        row = math.prod(entry.shape[1:])
        shape = tuple(max(stop - start, 0) for start, stop in bounds)
        if shape[1:] == entry.shape[1:]:
            return self._rows(entry, first * row, shape[0] * row, shape)
        result = torch.empty(shape, dtype=entry.dtype)
        step = max(1, _CHUNK // (row * entry.dtype.itemsize))
        for at in range(first, last, step):
            count = min(step, last - at)
            rows = self._chunk(count * row * entry.dtype.itemsize).view(entry.dtype)
            self._read(entry, at * row, rows)
            rows = rows.view(count, *entry.shape[1:])
            result[at - first : at - first + count] = rows[(slice(None), *slices[1:])]
        return result

    def _chunk(self, size: int) -> torch.Tensor:
        """Return memory for a chunk. One serves all tensors: freed ones leave holes in the heap."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]

    def _rows(
        self, entry: _TensorFileEntry, start: int, count: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return ``count`` elements, beginning with element ``start``."""
        tensor = torch.empty(shape, dtype=entry.dtype)
        if count:
            self._read(entry, start, tensor)
        return tensor

    def _read(self, entry: _TensorFileEntry, start: int, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with the elements from ``start`` on."""
        size = entry.dtype.itemsize
        raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        buffer = memoryview(raw)
        file = self._open.get(entry.file)
        try:
            if file is None:
                file = self._open[entry.file] = open(entry.file, "rb", buffering=0)
            file.seek(entry.start + start * size)
            done = 0
            while done < len(buffer):
                got = file.readinto(buffer[done:])  # type: ignore[attr-defined]
                if not got:
                    raise _fault(entry.file, "the file was truncated while it was read")
                done += got
        except OSError as cause:
            raise _fault(entry.file, f"it cannot be read: {cause}") from cause


def _index(path: Path) -> dict[str, str]:
    """Return file names by tensor name; empty without an index."""
    if not path.exists():
        return {}
    try:
        return parse_index(read_bytes(path, _LARGEST))
    except (OSError, ValueError) as cause:
        raise _fault(path, f"it is not a valid checkpoint index: {cause}") from cause


def _header(path: Path) -> dict[str, _TensorFileEntry]:
    """Return the tensors of a file; raise ValueError for an invalid file."""
    with open_regular_file(path) as (file, size):
        places = safetensors_header.decode(safetensors_header.read(file, size), size)
    found = {}
    for name, place in places.items():
        dtype = getattr(torch, NAMES.get(place.dtype, ""), None)
        if dtype is None:
            raise ValueError(f"{short(name)} has the unsupported dtype {quoted(place.dtype)}")
        found[name] = _TensorFileEntry(path, dtype, place.shape, place.start)
    return found


def _fault(path: Path, why: str) -> FxpartError:
    fix = "pass a .safetensors file, or a folder of them"
    return FxpartError(Problem("FXP110", path.name, why, fix))
