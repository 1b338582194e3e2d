"""Tensors in safetensors files, read one by one into memory of their own.

The files are read, not mapped: pages of a mapped file count as the process's memory for as long as
the file is open, and a rank that has read its part would hold it twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fxpart.errors import FxpartError, Problem, quoted, short
from fxpart.files import from_json, open_regular_file, read_bytes

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_LARGEST = 100_000_000  # bytes of a header, the format's own limit
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError
)  # fmt: skip
_CHUNK = 1 << 22  # bytes read at once of a tensor that is cut along an inner dim


@dataclass(frozen=True)
class _TensorFileEntry:
    """Where one tensor lies. start: its first byte in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFiles:
    """The tensors of one ``.safetensors`` file, or of a folder.

    Of a folder, the files that its ``model.safetensors.index.json`` lists, or all that lie there.
    Only headers are read until a tensor is asked for. Raises FXP110 when there is no such file,
    when one is damaged, when two have a tensor of the same name, or when one lacks a tensor that
    the index says is there.
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
            raise _fault(path, "the folder has no .safetensors file")
        self._entries: dict[str, _TensorFileEntry] = {}
        self._open: dict[Path, BinaryIO] = {}
        for file in files:
            try:
                found = _header(file)
            except _UNREADABLE as cause:
                problems.extend(_fault(file, f"it cannot be read: {cause}").problems)
                continue
            for name, entry in found.items():
                if name in self._entries:
                    problems.extend(_fault(file, f"{short(name)} is in another file too").problems)
                self._entries[name] = entry
        lost = [name for name in index if name not in self._entries]
        if lost and not problems:
            why = f"it lists {len(lost)} tensors that are in no file, {short(lost[0])} for one"
            problems.extend(_fault(path / INDEX, why).problems)
        if problems:
            raise FxpartError(problems)

    def names(self) -> Collection[str]:
        """All names in all files."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, from the header."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one tensor, from the header."""
        return self._entries[name].dtype

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU; nobody else has it."""
        entry = self._entries[name]
        return self._rows(entry, 0, math.prod(entry.shape), entry.shape)

    def read_part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A range of each dim of one tensor, on the CPU; never more in memory than a little more.

        Along the first dim nothing else is read; along others the rows that hold the part are.
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
            rows = self._rows(entry, at * row, count * row, (count, *entry.shape[1:]))
            result[at - first : at - first + count] = rows[(slice(None), *slices[1:])]
        return result

    def _rows(
        self, entry: _TensorFileEntry, start: int, count: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """``count`` elements from the element ``start`` on."""
        tensor = torch.empty(shape, dtype=entry.dtype)
        if not count:
            return tensor
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
                    raise _fault(entry.file, "it has become shorter while it was read")
                done += got
        except OSError as cause:
            raise _fault(entry.file, f"it cannot be read: {cause}") from cause
        return tensor


def _index(path: Path) -> dict[str, str]:
    """File names by tensor name; empty without an index."""
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = from_json(read_bytes(path, _LARGEST))["weight_map"]
        wrong = [file for file in found.values() if Path(file).name != file]
    except _UNREADABLE as cause:
        raise _fault(path, f"it is no index of a checkpoint: {cause!r}") from cause
    if wrong:
        raise _fault(path, f"{quoted(wrong[0])} is not the name of a file beside it")
    return found


def _header(path: Path) -> dict[str, _TensorFileEntry]:
    """The tensors of a file; ValueError where it is not as the format says."""
    with open_regular_file(path) as (file, size):
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LARGEST, size - 8):
            raise ValueError("the file is shorter than its header says")
        header: dict[str, Any] = from_json(file.read(length))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            kind = quoted(entry["dtype"])
            raise ValueError(f"{short(name)} is of dtype {kind}, which torch does not have")
        shape = tuple(int(n) for n in entry["shape"])
        start, stop = (int(n) for n in entry["data_offsets"])
        if min((*shape, start), default=0) < 0 or stop > size - 8 - length:
            raise ValueError(f"{short(name)} lies outside of the file")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{short(name)} has not the bytes of {quoted(list(shape))}")
        found[name] = _TensorFileEntry(path, dtype, shape, 8 + length + start)
    return found


def _fault(path: Path, why: str) -> FxpartError:
    fix = "give a .safetensors file, or a folder of them"
    return FxpartError(Problem("FXP110", path.name, why, fix))
