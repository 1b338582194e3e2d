"""One safetensors file that holds everything: tensors under their keys, the rest in its header."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpart.bounded import from_json
from fxpart.checkpoint.dtypes import DTYPES
from fxpart.checkpoint.exchange.source import (
    Held,
    Outline,
    Source,
    foreign,
    parse_rest,
    rest_text,
)
from fxpart.checkpoint.exchange.tensor_files import Place, read_header, read_place, write_file
from fxpart.checkpoint.exchange.writing import new_file
from fxpart.checkpoint.regions import Bytes

REST = "fxpart"
_BYTES = "fxpart.dtypes"  # of tensors that stand there as bytes, because safetensors lacks theirs


class WholeFile:
    """Such a file as a source; FXP110."""

    def __init__(self, path: Path) -> None:
        """Read the header."""
        self._places, metadata = read_header(path)
        if REST not in metadata:
            raise foreign(str(path), f"its header does not say {REST!r}", "--from hf")
        self.rest = parse_rest(metadata[REST], str(path))
        self.tensors = {key: place.outline for key, place in self._places.items()}
        try:
            stored: Any = from_json(metadata.get(_BYTES, "{}"))
            for key, dtype in stored.items():
                held = self.tensors[key]
                outline = Outline(dtype, held.shape[:-1])
                if held.dtype != "uint8" or DTYPES[dtype][0] != held.shape[-1]:
                    raise ValueError(f"{key[:80]!r} is not {dtype} as bytes")
                self.tensors[key] = outline
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as why:
            raise foreign(str(path), f"{_BYTES} does not fit its tensors: {why}") from why

    def read(self, key: str) -> Bytes:
        """The tensor's bytes."""
        place = self._places[key]
        return read_place(Place(place.file, self.tensors[key], place.start))

    def layout(self, key: str) -> Sequence[Held]:
        """Not known."""
        return ()


def write_whole(target: Path, source: Source) -> list[str]:
    """Write a new file; nothing is left out."""
    metadata = {"format": "pt", REST: rest_text(source.rest).decode()}
    stored = {k: o.dtype for k, o in source.tensors.items() if DTYPES[o.dtype][1] is None}
    if stored:
        metadata[_BYTES] = json.dumps(stored, sort_keys=True)
    with new_file(target) as fresh:
        write_file(fresh, source.tensors, source.read, metadata)
    return []


def is_whole(path: Path) -> bool:
    """Whether a file is one of these."""
    return REST in read_header(path)[1]
