"""Files as bytes, never more of one than its reader can use; TOML that does not take for ever."""

from __future__ import annotations

import errno
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST = 64 << 20  # bytes
_LONG_KEY = re.compile(r"""(?<![\w'"-])(?:[\w'"-]++[ \t]*+\.[ \t]*+){128}""")


def read_bytes(path: str | Path, most: int = MOST) -> bytes:
    """What a file holds. OSError, with words for a person, where it cannot be read.

    That is also so for a file of more than ``most`` bytes, and for what is no regular file: a pipe
    or a device could block for ever or never end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except ValueError as why:  # a path with a NUL
        raise OSError(errno.EINVAL, str(why), str(path)) from why
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def toml(text: str) -> Any:
    """What a TOML text says; ValueError or RecursionError where it is none.

    Also for a key of more than 128 parts: tomllib takes time by the square of their number.
    """
    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 128 parts")
    return tomllib.loads(text)
