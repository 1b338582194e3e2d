"""Safe access to the files of a checkpoint, and its error messages."""

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

CHUNK = 1 << 20  # bytes hashed and moved at once; fits the cache of a core
_ROOM = "free disk space; --keep 2 needs the least"
_FIXES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "allow larger files: ulimit -f unlimited",
    errno.EIO: "the disk is faulty: use a folder on another one",
}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def is_name(name: str) -> bool:
    """Return whether a file name is allowed: visible, in the folder itself, plain characters."""
    return _NAME.fullmatch(name) is not None


def format_key(key: str) -> str:
    """Return a tensor's key in a form that can be printed, for untrusted files."""
    text = key if key.isprintable() else ascii(key)[1:-1]
    return text if len(text) <= 200 else f"{text[:197]}..."


@contextmanager
def open_for_reading(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file to read; yield it and its size. OSError for anything else, also links.

    A pipe or device may block or be endless, and a link may lead anywhere.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as cause:
        if cause.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link") from cause
        raise
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        yield file, status.st_size


@contextmanager
def create_file(path: Path, *, lasting: bool = True) -> Iterator[BinaryIO]:
    """Create or replace a file; remove it on failure. lasting: sync to disk at the end."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
            yield file
            if lasting:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # free its space, for a full disk
        raise


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all data."""
    rest = memoryview(data)
    while rest:
        count = file.write(rest)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[count:]


def read(file: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes, or what is left."""
    status = []
    while size and (data := file.read(size)):
        status.append(data)
        size -= len(data)
    return b"".join(status)


def fill(file: BinaryIO, target: memoryview, at: int) -> None:
    """Fill the target from a position of the file; ValueError if the file is too short."""
    while target:
        count = os.preadv(file.fileno(), [target], at)
        if not count:
            raise ValueError("the file is truncated")
        target, at = target[count:], at + count


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(at)
    finally:
        os.close(at)


@contextmanager
def convert_save_errors(where: str) -> Iterator[None]:
    """Convert OSError to FXP513 with its place."""
    try:
        yield
    except OSError as cause:
        fix = _FIXES.get(cause.errno or 0, "make the folder writable, or use another one")
        raise error("FXP513", where=where, why=cause.strerror or str(cause), fix=fix) from cause


def make_damage_problem(folder: Path, what: str, why: str) -> Problem:
    """Return an FXP510 problem of a file or tensor of a checkpoint."""
    return Problem("FXP510", f"{folder}, {what}", why, _fix(folder))


def _fix(folder: Path) -> str:
    """Return which checkpoint is used instead."""
    try:
        older = [p.name for p in folder.parent.iterdir() if p.name.startswith("step-")]
    except OSError:
        older = []
    before = [name for name in older if name < folder.name]
    if before and folder.name.startswith("step-"):
        return f"the previous checkpoint, {max(before)}, is used instead"
    return "use a copy of it; there is no earlier checkpoint"
