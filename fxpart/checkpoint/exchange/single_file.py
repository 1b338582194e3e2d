"""One safetensors file that holds everything: tensors under their keys, the rest in its header."""

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
_BYTES = "fxpart.dtypes"  # of tensors that stand there as bytes, because safetensors lacks theirs


class SingleFileCheckpoint:
    """Such a file as a source; FXP110."""

    def __init__(self, path: Path) -> None:
        """Read the header."""
        self._places, metadata = read_header(path)
        if REST not in metadata:
            raise make_foreign_file_error(
                str(path), f"its header does not say {REST!r}", "--from hf"
            )
        self.rest = parse_metadata(metadata[REST], str(path))
        self.tensors = {key: place.outline for key, place in self._places.items()}
        try:
            stored: Any = from_json(metadata.get(_BYTES, "{}"))
            for key, dtype in stored.items():
                held = self.tensors[key]
                outline = TensorType(dtype, held.shape[:-1])
                if held.dtype != "uint8" or DTYPES[dtype][0] != held.shape[-1]:
                    raise ValueError(f"{key[:80]!r} is not {dtype} as bytes")
                self.tensors[key] = outline
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as why:
            raise make_foreign_file_error(
                str(path), f"{_BYTES} does not fit its tensors: {why}"
            ) from why

    def read(self, key: str) -> Bytes:
        """The tensor's bytes."""
        place = self._places[key]
        return read_place(SafetensorsLocation(place.file, self.tensors[key], place.start))

    def layout(self, key: str) -> Sequence[RankShard]:
        """Not known."""
        return ()


def write_whole(target: Path, source: CheckpointSource) -> list[str]:
    """Write a new file; nothing is left out."""
    metadata = {"format": "pt", REST: format_metadata(source.rest).decode()}
    stored = {k: o.dtype for k, o in source.tensors.items() if DTYPES[o.dtype][1] is None}
    if stored:
        metadata[_BYTES] = json.dumps(stored, sort_keys=True)
    with new_file(target) as fresh:
        write_file(fresh, source.tensors, source.read, metadata)
    return []


def is_whole(path: Path) -> bool:
    """Whether a file is one of these."""
    return REST in read_header(path)[1]
