"""Append-only files of JSON lines, readable after a process was killed while writing."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import msgspec

from fxpart.checkpoint.files import write
from fxpart.checkpoint.run_directory import make_unwritable_error
from fxpart.errors import FxpartError, error
from fxpart.files import open_regular_file

T = TypeVar("T")
_LONGEST = 1 << 20  # bytes of a line


def read_lines(path: Path, kind: Any) -> Iterator[Any]:
    """Yield the lines as ``kind``; nothing if the file does not exist.

    A truncated line is skipped: the last one, or one before a later process appended; also one
    with zeros, which a file system may leave where the power failed. FXP520 with the line number
    for any other invalid line.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        with open_regular_file(path) as (raw_file, _), io.BufferedReader(raw_file) as file:
            for number, raw in enumerate(_raw(file, path), start=1):
                if raw.strip() and b"\0" not in raw:
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
    """Appends lines to a file. A line that cannot be written leaves nothing of it in the file."""

    def __init__(self, path: Path) -> None:
        """Open the file, creating it and its folder if necessary; FXP603 if that fails."""
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(os.open(path, flags, 0o666), "ab+", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            self._torn = False  # the last line is incomplete: a process was killed while writing
            if size:
                self._file.seek(size - 1)
                self._torn = self._file.read(1) != b"\n"
        except OSError as cause:
            raise make_unwritable_error(path, cause) from cause

    @property
    def is_attached(self) -> bool:
        """Whether the path still leads to the open file: it was not removed, moved or replaced."""
        try:
            found, own = os.stat(self._path), os.fstat(self._file.fileno())
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def write(self, line: Any) -> None:
        """Write one line; FXP603."""
        data = msgspec.json.encode(line) + b"\n"
        before = 0
        try:
            before = os.fstat(self._file.fileno()).st_size
            write(self._file, b"\n" + data if self._torn else data)
        except OSError as cause:
            with contextlib.suppress(OSError):
                if os.fstat(self._file.fileno()).st_size > before:
                    torn, self._torn = self._torn, True
                    os.ftruncate(self._file.fileno(), before)
                    self._torn = torn
            raise make_unwritable_error(self._path, cause) from cause
        self._torn = False

    def sync(self) -> None:
        """Flush the file to disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as cause:
            raise make_unwritable_error(self._path, cause) from cause

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # nothing is buffered, so nothing is lost
            self._file.close()


def _raw(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise unreadable(path, f"a line is longer than {_LONGEST} bytes")
        yield line


def _decoded(decoder: Any, raw: bytes, path: Path, number: int) -> Any:
    """Return the line, or None if it is truncated."""
    try:
        return decoder.decode(raw.rstrip())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        short = isinstance(cause, msgspec.DecodeError) and not isinstance(
            cause, msgspec.ValidationError
        )
        # A truncated line may end with a brace that belongs to a text in it.
        open_end = not raw.rstrip().endswith(b"}") or "truncated" in str(cause)
        if short and raw.startswith(b"{") and open_end:
            return None
        raise unreadable(path, str(cause), number) from cause
