"""Files as bytes, never more of one than its reader can use; JSON and TOML with bounded numbers.

A TOML text does not take for ever, and no integer is beyond 64 bits: sums and products of such
can always become a float.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
MOST = 64 << 20  # bytes
_LONG_KEY = re.compile(r"""(?<![\w'"-])(?:[\w'"-]++[ \t]*+\.[ \t]*+){128}""")
# A fast first check: most texts have no run of so many digits outside of fractions.
_LONG_NUMBER = re.compile(rb"(?<![0-9.])[0-9]{19}")


@contextmanager
def open_regular_file(path: str | Path) -> Iterator[tuple[FileIO, int]]:
    """Open a regular file for unbuffered reading; return it and its size in bytes.

    Raises OSError with a readable message for anything else, as a pipe or a device could block
    forever or never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as why:  # a path with a NUL
        raise OSError(errno.EINVAL, str(why), str(path)) from why
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with open(descriptor, "rb", buffering=0) as file:
        yield file, found.st_size


def read_bytes(path: str | Path, most: int = MOST) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises OSError with a readable message for larger files and in the cases of
    :func:`open_regular_file`.
    """
    with open_regular_file(path) as (file, size):
        found, left = [], most + 1
        # `read` allocates as much memory as is requested, however short the file is.
        while left and (data := file.read(min(left, size + 1))):
            found.append(data)
            left -= len(data)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return b"".join(found)


@overload
def from_json(text: bytes | str) -> Any: ...


@overload
def from_json(text: bytes | str, kind: type[T]) -> T: ...


def from_json(text: bytes | str, kind: Any = Any) -> Any:
    """Parse a JSON text as the msgspec type ``kind``, with integers of at most 64 bits.

    Raises ValueError, RecursionError or msgspec.MsgspecError, which is msgspec.ValidationError
    where it is JSON of another kind or with larger integers.
    """
    data = text.encode() if isinstance(text, str) else text
    if _LONG_NUMBER.search(data):
        whole_numbers(msgspec.json.decode(data))
    return msgspec.json.decode(data, type=kind)


def check_unique_keys(text: bytes | str) -> None:
    """Raise ValueError naming a key that an object of a JSON text has twice.

    Other readers may take the first or the last one.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} occurs twice")
            seen.add(key)

    json.loads(text, object_pairs_hook=check)


def toml(text: str) -> Any:
    """Parse a TOML text; ValueError or RecursionError if it is not valid.

    Also for a key of more than 128 parts: tomllib takes time by the square of their number; and
    for integers of more than 64 bits.
    """
    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 128 parts")
    found = tomllib.loads(text)
    whole_numbers(found)
    return found


def whole_numbers(value: Any, path: str = "$") -> None:
    """msgspec.ValidationError naming the place of an integer that 64 bits do not hold."""
    if isinstance(value, dict):
        for key, item in value.items():
            whole_numbers(item, f"{path}.{key if len(key) <= 80 else '...'}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            whole_numbers(item, f"{path}[{place}]")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise msgspec.ValidationError(f"the number is too large - at `{path}`")
