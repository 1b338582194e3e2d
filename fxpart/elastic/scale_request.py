"""Requests for another number of ranks during a run: ``fxpart scale RUN N``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fxpart.checkpoint.run_directory import RunDir
from fxpart.elastic.plan_cache import write_atomically
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.errors import FxpartError, error
from fxpart.files import from_json, open_regular_file, read_bytes

_REQUEST_FILE = "scale.json"
_LOCK_FILE = "supervisor.json"
_MOST_BYTES = 1 << 16


class ScaleRequest(msgspec.Struct, frozen=True):
    """The requested number of ranks, from the next step on."""

    ranks: int


class LauncherRecord(msgspec.Struct, frozen=True):
    """The launcher of a run: its process, the bounds and the current number of ranks."""

    pid: int
    least: int
    most: int
    ranks: int


@contextmanager
def lock_run(run: RunDir, bounds: RankBounds) -> Iterator[RunLock]:
    """Hold the exclusive lock of a run while the block runs.

    FXP109 if another process holds it; FXP603 if the folder cannot be written. The kernel releases
    the lock when the process ends in any way.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        at = os.open(run.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as why:
        raise _unwritable(run.path, why) from why
    try:
        if not _try_lock(at):
            raise error(
                "FXP109",
                where=f"--run {run.path}",
                why="another launcher is running it",
                fix="stop that launcher first, or use another folder",
            )
        (run.path / _REQUEST_FILE).unlink(missing_ok=True)  # of an earlier launcher
        yield RunLock(run, bounds, at)
    finally:
        os.close(at)


class RunLock:
    """The launcher's side: publishes the number of ranks, and reads requests."""

    def __init__(self, run: RunDir, bounds: RankBounds, at: int) -> None:
        """Create the lock. at: descriptor of the locked file."""
        self._run, self._bounds, self._at = run, bounds, at
        self._seen: tuple[int, int] | None = None

    def publish_ranks(self, ranks: int) -> None:
        """Publish the current number of ranks; written in place, because the file itself is
        locked.
        """
        own = LauncherRecord(os.getpid(), self._bounds.least, self._bounds.most, ranks)
        data = msgspec.json.encode(own)
        os.pwrite(self._at, data, 0)
        os.ftruncate(self._at, len(data))

    def read_request(self) -> int | None:
        """Return the number of ranks requested since the last call, or None.

        Invalid files are ignored.
        """
        path = self._run.path / _REQUEST_FILE
        try:
            found = path.stat()
            at = (found.st_mtime_ns, found.st_ino)
            if at == self._seen:
                return None
            ranks = from_json(read_bytes(path, _MOST_BYTES), ScaleRequest).ranks
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return None
        self._seen = at
        return ranks if ranks in self._bounds else None


def request_rank_count(run: RunDir, ranks: int) -> LauncherRecord:
    """Request another number of ranks from the launcher of ``run``; return the launcher.

    FXP520 if the folder is not a run's; FXP109 if no launcher runs it, or outside its bounds.
    """
    launcher = read_launcher_record(run)
    if launcher is None:
        raise error(
            "FXP109",
            where=f"scale {run.path}",
            why="no launcher is running it",
            fix="start it with fxpart train --nproc MIN:MAX --run DIR",
        )
    if not launcher.least <= ranks <= launcher.most:
        bounds = RankBounds(launcher.least, launcher.most)
        raise error(
            "FXP109",
            where=f"scale {run.path} {ranks}",
            why=f"it was started with --nproc {bounds}",
            fix="request a number within these bounds, or restart it with other bounds",
        )
    try:
        write_atomically(run.path / _REQUEST_FILE, msgspec.json.encode(ScaleRequest(ranks)))
    except OSError as why:
        raise _unwritable(run.path, why) from why
    return launcher


def read_launcher_record(run: RunDir) -> LauncherRecord | None:
    """Return the launcher of a run, or None. FXP520 if the folder is not a run's."""
    path = run.path / _LOCK_FILE
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
        return from_json(data, LauncherRecord)
    except (ValueError, RecursionError, msgspec.MsgspecError) as why:
        raise _unreadable(path, str(why)) from why


def _try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file; return whether that was possible."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unreadable(path: Path, why: str) -> FxpartError:
    return error("FXP520", where=str(path), why=why, fix="pass the folder of --run")


def _unwritable(path: Path, why: OSError) -> FxpartError:
    text = why.strerror or str(why)
    return error("FXP603", where=str(path), why=text, fix="use a writable --run folder")
