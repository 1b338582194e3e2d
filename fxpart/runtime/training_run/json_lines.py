"""Append-only files of JSON lines, readable after a process was killed while writing."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.files import open_regular_file

T = TypeVar("T")
_LONGEST = 1 << 20  # bytes of a line


def read_lines(path: Path, kind: Any) -> Iterator[Any]:
    """Yield the lines as ``kind``; nothing if the file does not exist.

    A truncated line is skipped: the last one, or one before a later process appended. FXP520 with
    the line number for any other invalid line.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        with open_regular_file(path) as (raw_file, _), io.BufferedReader(raw_file) as file:
            for number, raw in enumerate(_raw(file, path), start=1):
                if raw.strip():
                    found = _decoded(decoder, raw, path, number)
                    if found is not None:
                        yield found
    except FileNotFoundError:
        return
    except OSError as cause:
        raise unreadable(path, str(cause)) from cause


def unreadable(path: Path, why: str, line: int = 0) -> FxpartError:
    """Return FXP520 for a file, or a line of it."""
    where = f"{path}, line {line}" if line else str(path)
    return error("FXP520", where=where, why=why, fix="pass the folder of a run")


class JsonLinesAppender:
    """Appends lines to a file and flushes each."""

    def __init__(self, path: Path) -> None:
        """Open the file, creating it and its folder if necessary; FXP603 if that fails."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab+")
            size = self._file.seek(0, os.SEEK_END)
            if size:
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":  # a process was killed while writing
                    self._file.write(b"\n")
        except OSError as cause:
            raise _unwritable(path, cause) from cause

    def write(self, line: Any) -> None:
        """Write one line."""
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as cause:
            raise _unwritable(self._path, cause) from cause

    def sync(self) -> None:
        """Flush the file to disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as cause:
            raise _unwritable(self._path, cause) from cause

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _raw(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise unreadable(path, f"a line is longer than {_LONGEST} bytes")
        yield line


def _decoded(decoder: Any, raw: bytes, path: Path, number: int) -> Any:
    """Return the line, or None if it is truncated."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        short = isinstance(cause, msgspec.DecodeError) and not isinstance(
            cause, msgspec.ValidationError
        )
        if short and raw.startswith(b"{") and not raw.rstrip().endswith(b"}"):
            return None
        raise unreadable(path, str(cause), number) from cause


def _unwritable(path: Path, cause: OSError) -> FxpartError:
    return error("FXP603", where=str(path), why=str(cause), fix="use a writable folder")
