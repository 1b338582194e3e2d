"""One safetensors file with all tensors under their keys, and metadata in its header."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.exchange.atomic_output import new_file
from fxpart.checkpoint.exchange.source import (
    CheckpointSource,
    RankShard,
    TensorType,
    format_metadata,
    make_foreign_file_error,
    parse_metadata,
)
from fxpart.checkpoint.exchange.tensor_files import (
    SafetensorsLocation,
    read_header,
    read_place,
    write_file,
)
from fxpart.checkpoint.regions import Bytes
from fxpart.files import from_json

REST = "fxpart"
_BYTES = "fxpart.dtypes"  # tensors stored as bytes, because safetensors lacks their dtype


class SingleFileCheckpoint:
    """A file of this format as a source; FXP110."""

    def __init__(self, path: Path) -> None:
        """Read the header."""
        self._places, metadata = read_header(path)
        if REST not in metadata:
            raise make_foreign_file_error(str(path), f"its header has no {REST!r}", "use --from hf")
        self.rest = parse_metadata(metadata[REST], str(path))
        self.tensors = {key: place.tensor_type for key, place in self._places.items()}
        try:
            byte_dtypes: Any = from_json(metadata.get(_BYTES, "{}"))
            for key, dtype in byte_dtypes.items():
                stored_type = self.tensors[key]
                tensor_type = TensorType(dtype, stored_type.shape[:-1])
                if stored_type.dtype != "uint8" or DTYPES[dtype][0] != stored_type.shape[-1]:
                    raise ValueError(f"{key[:80]!r} does not contain bytes of {dtype}")
                self.tensors[key] = tensor_type
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as why:
            raise make_foreign_file_error(
                str(path), f"{_BYTES} does not match its tensors: {why}"
            ) from why

    def read(self, key: str) -> Bytes:
        """Return the tensor's bytes."""
        place = self._places[key]
        return read_place(SafetensorsLocation(place.file, self.tensors[key], place.start))

    def layout(self, key: str) -> Sequence[RankShard]:
        """Return (): the layout is unknown."""
        return ()


def write_whole(target: Path, source: CheckpointSource) -> list[str]:
    """Write a new file; all keys are supported."""
    metadata = {"format": "pt", REST: format_metadata(source.rest).decode()}
    byte_dtypes = {k: o.dtype for k, o in source.tensors.items() if DTYPES[o.dtype][1] is None}
    if byte_dtypes:
        metadata[_BYTES] = json.dumps(byte_dtypes, sort_keys=True)
    with new_file(target) as fresh:
        write_file(fresh, source.tensors, source.read, metadata)
    return []


def is_whole(path: Path) -> bool:
    """Return whether a file has this format."""
    return REST in read_header(path)[1]
