"""Exclusive lock of a run's folder: one process writes there, with the ranks that it starts.

The lock is taken by whatever starts the run: the launcher of ``fxpart train --nproc``, or rank 0
of any other start (a single process, torchrun, a script). The kernel releases it when the process
ends in any way. A file system without locks, or a lock that is lost, is covered by the generation
of the run (:mod:`fxpart.runtime.training_run.generations`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Literal

import msgspec

from fxpart.checkpoint.run_directory import RunDir, make_unwritable_error
from fxpart.errors import FxpartError, error
from fxpart.files import from_json, open_regular_file
from fxpart.launch.process_status import is_stopped

_MOST_BYTES = 1 << 16
_RETRY_SECONDS = 0.05
# Another process may hold the lock for a moment, to see whether it is free.
PATIENCE = 0.3
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class LauncherRecord(msgspec.Struct, frozen=True):
    """The process that runs a run: its bounds and the current number of ranks.

    role: "launcher" of ranks, or "trainer" for rank 0 of a run without fxpart's launcher.
    """

    pid: int
    least: int
    most: int
    ranks: int
    role: Literal["launcher", "trainer"] = "launcher"
    host: str = ""


class RunLock:
    """The lock of a run. descriptor: None if this process's launcher has the lock."""

    def __init__(self, run: RunDir, descriptor: int | None) -> None:
        """Wrap a locked file; see :func:`lock_folder`."""
        self._run, self._descriptor = run, descriptor
        if descriptor is not None:
            _held.add(descriptor)

    def publish(
        self, least: int, most: int, ranks: int, role: Literal["launcher", "trainer"]
    ) -> None:
        """Publish who holds it; written in place, because the file itself is locked.

        The record is for messages and ``fxpart scale`` only, so a full disk is no failure.
        """
        if self._descriptor is None:
            return
        own = LauncherRecord(os.getpid(), least, most, ranks, role, socket.gethostname())
        data = msgspec.json.encode(own)
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))

    def renew(self) -> None:
        """Lock the file again if the folder was removed or replaced; FXP521, FXP603."""
        if self._descriptor is None:
            return
        try:
            found, own = self._run.lock.stat(), os.fstat(self._descriptor)
            if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
                return
        except OSError:
            pass
        renewed = lock_folder(self._run)
        self.close()
        self._descriptor, renewed._descriptor = renewed._descriptor, None

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


_held: set[int] = set()


def _forget_after_fork() -> None:
    """Close the descriptors in a forked child, which would keep the locks after its parent."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_after_fork)


def lock_folder(run: RunDir, *, patience: float = PATIENCE) -> RunLock:
    """Lock a run's folder, which is created if necessary.

    patience: seconds to wait for another process. FXP521 if another process holds the lock, unless
    that is the launcher that started this process; FXP603 if the folder cannot be written.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(run.lock, flags, 0o666)
    except OSError as why:
        raise make_unwritable_error(run.path, why) from why
    limit = time.monotonic() + patience
    try:
        while not _try_lock(descriptor):
            holder = _read_record(run.lock)
            if holder is not None and holder.role == "launcher" and holder.pid == os.getppid():
                os.close(descriptor)
                return RunLock(run, None)
            if time.monotonic() >= limit:
                raise make_locked_error(run.path, holder)
            time.sleep(_RETRY_SECONDS)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return RunLock(run, descriptor)


def check_unlocked(run: RunDir) -> None:
    """Raise FXP521 if another process runs the run; nothing is created."""
    if run.lock.exists():
        lock_folder(run).close()


def read_launcher_record(run: RunDir) -> LauncherRecord | None:
    """Return the launcher of a run, or None. FXP520 if the folder is not a run's."""
    path = run.lock
    try:
        with open_regular_file(path) as (file, _):
            if _try_lock(file.fileno(), shared=True):
                return None
            data = file.read(_MOST_BYTES)
    except FileNotFoundError as why:
        if run.path.is_dir():
            return None
        raise _unreadable(run.path, "the folder does not exist") from why
    except OSError as why:
        raise _unreadable(path, why.strerror or str(why)) from why
    try:
        found = from_json(data, LauncherRecord)
    except (ValueError, RecursionError, msgspec.MsgspecError) as why:
        raise _unreadable(path, str(why)) from why
    return found if found.role == "launcher" else None


def make_locked_error(path: Path, holder: LauncherRecord | None) -> FxpartError:
    """Return FXP521 for a run that another process runs."""
    who, fix = "another process", "stop it first, or use another folder"
    if holder is not None:
        here = holder.host in ("", socket.gethostname())
        there = "" if here else f" on {holder.host}"
        who = f"another {holder.role}, process {holder.pid}{there},"
        if here and is_stopped(holder.pid):
            who, fix = f"{who} which is stopped,", f"resume it, or end it with kill -9 {holder.pid}"
    return error("FXP521", where=f"--run {path}", why=f"{who} is running it", fix=fix)


def _read_record(path: Path) -> LauncherRecord | None:
    """Return the record of the process that holds a lock, if it can be read."""
    try:
        with open_regular_file(path) as (file, _):
            return from_json(file.read(_MOST_BYTES), LauncherRecord)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file; return whether that was possible, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as why:
        if why.errno not in _WITHOUT_LOCKS:
            raise
    return True


def _unreadable(path: Path, why: str) -> FxpartError:
    return error("FXP520", where=str(path), why=why, fix="pass the folder of --run")
