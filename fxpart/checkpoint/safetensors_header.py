"""Headers of safetensors files: where each tensor lies. Nothing of a file is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fxpart.files import from_json

LARGEST = 100_000_000  # bytes of a header, the format's own limit
_METADATA = "__metadata__"
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
}  # fmt: skip


class SafetensorsEntry(NamedTuple):
    """Where a tensor lies: safetensors' dtype and shape, first byte in the file and after last."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.stop - self.start


def encode(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file: its length and JSON, padded to 8 bytes.

    tensors: name, safetensors' dtype, shape and bytes of each, in the order of the file.
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


def decode(header: bytes, size: int) -> dict[str, SafetensorsEntry]:
    """The tensors of a file of ``size`` bytes that begins with ``header``.

    ValueError where it is not as the format says: they fill the file, one after another.
    """
    try:
        found = from_json(header[8:])
    except RecursionError as cause:
        raise ValueError("its header is nested too deep") from cause
    if not isinstance(found, dict):
        raise ValueError("its header is no object")
    places = {n: _place(n, e, len(header)) for n, e in found.items() if n != _METADATA}
    done = len(header)
    for name, place in sorted(places.items(), key=lambda item: item[1][2:]):
        if place.start != done:
            raise ValueError(f"{name[:80]!r} does not begin where the tensor before it ends")
        done = place.stop
    if done != size:
        raise ValueError(f"its tensors end at byte {done} of {size}")
    return places


def _place(name: str, entry: Any, begin: int) -> SafetensorsEntry:
    """One entry of a header."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        sound = isinstance(shape, list) and len(shape) <= 64
        sound = sound and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        if not sound or stop - start != math.prod(shape) * _BITS[dtype] // 8:
            raise ValueError
    except (KeyError, TypeError, ValueError) as cause:
        raise ValueError(f"its header's entry {name[:80]!r} is wrong") from cause
    return SafetensorsEntry(dtype, tuple(shape), begin + start, begin + stop)
