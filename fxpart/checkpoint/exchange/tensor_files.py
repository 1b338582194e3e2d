"""Single safetensors files of others: headers read with suspicion, tensors one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fxpart.checkpoint import dtypes, files, safetensors_header
from fxpart.checkpoint.exchange.source import NAMES, TensorType, as_view, make_foreign_file_error
from fxpart.checkpoint.regions import Bytes
from fxpart.files import from_json


@dataclass(frozen=True)
class SafetensorsLocation:
    """Where a tensor lies. start: its first byte in the file."""

    file: Path
    outline: TensorType
    start: int


def read_header(path: Path) -> tuple[dict[str, SafetensorsLocation], dict[str, str]]:
    """The tensors of a file by name, and its metadata; FXP110 where it is not as the format says.

    Every tensor lies within the file, so that reading one never takes more memory than the file.
    """
    try:
        with files.open_for_reading(_followed(path)) as (file, size):
            first = files.read(file, 8)
            length = int.from_bytes(first, "little")
            if length > min(safetensors_header.LARGEST, size - 8):
                raise ValueError("it is shorter than its header says")
            header = first + files.read(file, length)
        places = safetensors_header.decode(header, size)
        given = from_json(header[8:]).get("__metadata__") or {}
        metadata = {key: value for key, value in given.items() if isinstance(value, str)}
        found = {}
        for name, place in places.items():
            if place.dtype not in NAMES:
                raise ValueError(f"{name[:80]!r} is of dtype {place.dtype}, which torch lacks")
            outline = TensorType(NAMES[place.dtype], place.shape)
            found[name] = SafetensorsLocation(path, outline, place.start)
    except (OSError, ValueError, AttributeError) as cause:
        raise make_foreign_file_error(
            str(path), f"it is no whole safetensors file: {cause}"
        ) from cause
    return found, metadata


def read_place(place: SafetensorsLocation) -> Bytes:
    """A tensor's bytes, 1-d; FXP110."""
    data = np.empty(place.outline.size, np.uint8)
    try:
        with files.open_for_reading(_followed(place.file)) as (file, _):
            files.fill(file, as_view(data), place.start)
    except (OSError, ValueError) as cause:
        raise make_foreign_file_error(str(place.file), f"it cannot be read: {cause}") from cause
    return data


def write_file(
    path: Path,
    tensors: Mapping[str, TensorType],
    read: Callable[[str], Bytes],
    metadata: Mapping[str, str],
) -> None:
    """A new safetensors file, on the disk when this returns; OSError.

    read: a tensor's bytes, asked for one after another, wide elements first so that all lie at
    multiples of their size. A dtype that safetensors lacks is written as bytes, with a dim more.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    entries = []
    for name in order:
        outline = tensors[name]
        entries.append((name, *dtypes.to_header_entry(outline.dtype, outline.shape), outline.size))
    with files.create_file(path) as file:
        files.write(file, safetensors_header.encode(entries, metadata))
        for name in order:
            data = read(name)
            assert data.nbytes == tensors[name].size, name
            files.write(file, as_view(data))


def _followed(path: Path) -> Path:
    """Where links lead: a Hugging Face cache is made of them."""
    return Path(os.path.realpath(path))
