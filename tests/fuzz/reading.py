"""What a reader of files is to the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuzz.mutations import Kind, Sample

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    read: of a file's bytes. samples: good ones, which the project itself wrote. opens: the
    functions below fxpart that open such files. lenient: it refuses nothing, and takes what it
    cannot read for absent.
    """

    read: Callable[[bytes], object]
    samples: Callable[[], list[Sample]]
    opens: tuple[str, ...]
    lenient: bool = False


@cache
def scratch() -> Path:
    """A folder of this process; what readers do outside of it is a fault."""
    keep = tempfile.TemporaryDirectory(prefix="fuzz-")
    _KEPT.append(keep)
    return Path(keep.name).resolve()


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def in_file(name: str, load: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of paths: the bytes are written to a file first."""

    def read(data: bytes) -> object:
        path = scratch() / name
        path.write_bytes(data)
        return load(path)

    return read


def plain(kind: Kind, *data: bytes | str) -> list[Sample]:
    """Samples whose data is the whole file."""
    return [Sample(d.encode() if isinstance(d, str) else d, kind) for d in data]
