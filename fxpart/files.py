"""Files as bytes, never more of one than its reader can use; JSON and TOML with bounded numbers.

A TOML text does not take for ever, and no integer is beyond 64 bits: sums and products of such
can always become a float.
"""

from __future__ import annotations

import errno
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
# Before anything is looked at one by one: most texts have no such run, apart from fractions.
_LONG_NUMBER = re.compile(rb"(?<![0-9.])[0-9]{19}")


@contextmanager
def open_regular_file(path: str | Path) -> Iterator[tuple[FileIO, int]]:
    """A regular file, opened to read without a buffer, and its bytes; OSError for anything else.

    A pipe or a device could block for ever or never end. The words of the error are for a person.
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
    """What a file holds. OSError, with words for a person, where :func:`open_regular_file` refuses
    it.

    That is also so for a file of more than ``most`` bytes.
    """
    with open_regular_file(path) as (file, size):
        found, left = [], most + 1
        # As much memory is taken as is asked for, however little there is.
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
    """What a JSON text says, as the msgspec type ``kind``, its integers of 64 bits at most.

    Raises ValueError, RecursionError or msgspec.MsgspecError, which is msgspec.ValidationError
    where it is JSON of another kind or with larger integers.
    """
    data = text.encode() if isinstance(text, str) else text
    if _LONG_NUMBER.search(data):
        whole_numbers(msgspec.json.decode(data))
    return msgspec.json.decode(data, type=kind)


def toml(text: str) -> Any:
    """What a TOML text says; ValueError or RecursionError where it is none.

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
