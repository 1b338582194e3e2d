"""Headers of safetensors files: location of each tensor. Files are not trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from fxpart.checkpoint import files
from fxpart.files import check_unique_keys, from_json

LARGEST = 100_000_000  # bytes of a header, limit of the format
_MOST_ELEMENTS = 1 << 59
_METADATA = "__metadata__"
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
}  # fmt: skip


class SafetensorsEntry(NamedTuple):
    """Location of a tensor: dtype and shape in safetensors terms, byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


def encode(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a file: length and JSON, padded to 8 bytes.

    tensors: name, safetensors dtype, shape and bytes of each, in file order.
    """
    found: dict[str, Any] = {_METADATA: dict(metadata)}
    done = 0
    for name, dtype, shape, size in tensors:
        offsets = [done, done + size]
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        done += size
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(file: BinaryIO, size: int) -> bytes:
    """Return the header of a file of ``size`` bytes; ValueError if the file is shorter."""
    first = files.read(file, 8)
    length = int.from_bytes(first, "little")
    if length > min(LARGEST, size - 8):
        raise ValueError("it is truncated")
    return first + files.read(file, length)


def decode(header: bytes, size: int) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a file of ``size`` bytes that begins with ``header``.

    ValueError if the format is violated: tensors must fill the file without gaps.
    """
    try:
        found = from_json(header[8:])
        own = len(found) - (_METADATA in found) if isinstance(found, dict) else 0
        if header.count(b'"data_offsets"') != own:
            check_unique_keys(header[8:])
    except RecursionError as cause:
        raise ValueError("its header is nested too deeply") from cause
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    entries = {n: _parse_entry(n, e, len(header)) for n, e in found.items() if n != _METADATA}
    done = len(header)
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != done:
            raise ValueError(f"{name[:80]!r} does not begin at the end of the previous tensor")
        done = entry.stop
    if done != size:
        raise ValueError(f"its tensors end at byte {done}, but the file has {size}")
    return entries


def _parse_entry(name: str, entry: Any, begin: int) -> SafetensorsEntry:
    """Parse one entry of a header."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        valid = isinstance(shape, list) and len(shape) <= 64
        valid = valid and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        if not valid or stop - start != math.prod(shape) * _BITS[dtype] // 8:
            raise ValueError
    except (KeyError, TypeError, ValueError) as cause:
        raise ValueError(f"the entry {name[:80]!r} of its header is invalid") from cause
    # Also of a tensor without elements, torch multiplies the sizes to strides.
    if math.prod(n or 1 for n in shape) >= _MOST_ELEMENTS:
        raise ValueError(f"the sizes of {name[:80]!r} are too large for a tensor")
    return SafetensorsEntry(dtype, tuple(shape), begin + start, begin + stop)
