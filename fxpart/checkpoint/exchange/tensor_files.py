"""Foreign safetensors files: validated headers, and tensors read one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fxpart.checkpoint import dtypes, files, safetensors_header
from fxpart.checkpoint.exchange.source import TensorType, as_view, make_foreign_file_error
from fxpart.checkpoint.regions import Bytes
from fxpart.files import from_json


@dataclass(frozen=True)
class SafetensorsLocation:
    """Location of a tensor. start: its first byte in the file."""

    file: Path
    tensor_type: TensorType
    start: int


def read_header(path: Path) -> tuple[dict[str, SafetensorsLocation], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata; FXP110 if it violates the format.

    Every tensor is within the file, so reading one never needs more memory than the file.
    """
    try:
        with files.open_for_reading(_resolve_links(path)) as (file, size):
            header = safetensors_header.read(file, size)
        places = safetensors_header.decode(header, size)
        given = from_json(header[8:]).get("__metadata__") or {}
        metadata = {key: value for key, value in given.items() if isinstance(value, str)}
        found = {}
        for name, place in places.items():
            if place.dtype not in dtypes.NAMES:
                raise ValueError(
                    f"{name[:80]!r} has the dtype {place.dtype}, which torch does not support"
                )
            tensor_type = TensorType(dtypes.NAMES[place.dtype], place.shape)
            found[name] = SafetensorsLocation(path, tensor_type, place.start)
    except (OSError, ValueError, AttributeError) as cause:
        raise make_foreign_file_error(
            str(path), f"it is not a complete safetensors file: {cause}"
        ) from cause
    return found, metadata


def read_place(place: SafetensorsLocation) -> Bytes:
    """Return a tensor's bytes, 1-d; FXP110."""
    data = np.empty(place.tensor_type.size, np.uint8)
    try:
        with files.open_for_reading(_resolve_links(place.file)) as (file, _):
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
    """Write a new safetensors file, synced to disk; OSError.

    read: returns a tensor's bytes, called by decreasing element size, so that all tensors are
    aligned. A dtype that safetensors lacks is written as bytes with another dim.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    entries = []
    for name in order:
        tensor_type = tensors[name]
        entries.append(
            (name, *dtypes.to_header_entry(tensor_type.dtype, tensor_type.shape), tensor_type.size)
        )
    with files.create_file(path) as file:
        files.write(file, safetensors_header.encode(entries, metadata))
        for name in order:
            data = read(name)
            assert data.nbytes == tensors[name].size, name
            files.write(file, as_view(data))


def _resolve_links(path: Path) -> Path:
    """Resolve links, which a Hugging Face cache consists of."""
    return Path(os.path.realpath(path))
