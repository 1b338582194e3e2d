"""Files of a checkpoint, opened without following anything, and its failures in words."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fxpart.errors import Problem, error

CHUNK = 1 << 20  # bytes hashed and moved at once: what a core's cache holds
_ROOM = "free some space; --keep 2 keeps the fewest"
_FIXES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "allow larger files: ulimit -f unlimited",
    errno.EIO: "the disk fails: give a folder on another",
}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def is_name(name: str) -> bool:
    """Whether a file may have this name: one in the folder itself, visible, of plain letters."""
    return _NAME.fullmatch(name) is not None


def format_key(key: str) -> str:
    """A tensor's key as it may be printed, whatever a file says it is."""
    text = key if key.isprintable() else ascii(key)[1:-1]
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextmanager
def open_for_reading(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, opened to read, and its bytes; OSError for anything else, links too.

    A pipe or a device could block for ever or never end, and a link could lead anywhere.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is no regular file")
        yield file, found.st_size


@contextmanager
def create_file(path: Path, *, lasting: bool = True) -> Iterator[BinaryIO]:
    """A file to be written anew; removed where that fails. lasting: on the disk at the end."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
            yield file
            if lasting:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # what it takes of a full disk is wanted back
        raise


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def read(file: BinaryIO, size: int) -> bytes:
    """The next ``size`` bytes, or what there is."""
    found = []
    while size and (data := file.read(size)):
        found.append(data)
        size -= len(data)
    return b"".join(found)


def fill(file: BinaryIO, target: memoryview, at: int) -> None:
    """Read into the target from a byte of the file on; ValueError where the file ends before."""
    while target:
        got = os.preadv(file.fileno(), [target], at)
        if not got:
            raise ValueError("the file has become shorter")
        target, at = target[got:], at + got


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk: what was made, renamed and removed in it."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(at)
    finally:
        os.close(at)


@contextmanager
def convert_save_errors(where: str) -> Iterator[None]:
    """What fails inside is FXP513 with its place."""
    try:
        yield
    except OSError as cause:
        fix = _FIXES.get(cause.errno or 0, "make the folder writable, or give another")
        raise error("FXP513", where=where, why=cause.strerror or str(cause), fix=fix) from cause


def make_damage_problem(folder: Path, what: str, why: str) -> Problem:
    """FXP510 about a file or tensor of a checkpoint."""
    return Problem("FXP510", f"{folder}, {what}", why, _fix(folder))


def _fix(folder: Path) -> str:
    """The checkpoint that is used instead."""
    try:
        older = [p.name for p in folder.parent.iterdir() if p.name.startswith("step-")]
    except OSError:
        older = []
    before = [name for name in older if name < folder.name]
    if before and folder.name.startswith("step-"):
        return f"the checkpoint before it is used: {max(before)}"
    return "a copy of it, if there is one; no checkpoint stands before it"
