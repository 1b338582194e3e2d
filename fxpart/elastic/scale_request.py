"""Another number of ranks, asked for while the run goes on: ``fxpart scale RUN N``."""

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

_WISH = "scale.json"
_HELD = "supervisor.json"
_MOST_BYTES = 1 << 16


class ScaleRequest(msgspec.Struct, frozen=True):
    """So many ranks, at the next step."""

    ranks: int


class LauncherRecord(msgspec.Struct, frozen=True):
    """Who runs a run: the launcher's process, and how many ranks it may have and has."""

    pid: int
    least: int
    most: int
    ranks: int


@contextmanager
def lock_run(run: RunDir, bounds: RankBounds) -> Iterator[RunLock]:
    """While the block runs, this process alone runs the run.

    FXP109 where another does; FXP603 where the folder cannot be written. The kernel lets go of it
    when the process ends, however that ends.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        at = os.open(run.path / _HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as why:
        raise _unwritable(run.path, why) from why
    try:
        if not _lock(at):
            raise error(
                "FXP109",
                where=f"--run {run.path}",
                why="another launcher runs it already",
                fix="stop that one first, or give another folder",
            )
        (run.path / _WISH).unlink(missing_ok=True)  # of an earlier launcher
        yield RunLock(run, bounds, at)
    finally:
        os.close(at)


class RunLock:
    """The launcher's side: it says how many ranks there are, and reads what is wished for."""

    def __init__(self, run: RunDir, bounds: RankBounds, at: int) -> None:
        """at: the locked file's descriptor."""
        self._run, self._bounds, self._at = run, bounds, at
        self._seen: tuple[int, int] | None = None

    def tell(self, ranks: int) -> None:
        """There are so many ranks now; written in place, as the lock is on the file itself."""
        own = LauncherRecord(os.getpid(), self._bounds.least, self._bounds.most, ranks)
        data = msgspec.json.encode(own)
        os.pwrite(self._at, data, 0)
        os.ftruncate(self._at, len(data))

    def wish(self) -> int | None:
        """The number of ranks that was asked for since the last call; None where none was.

        What no ``fxpart scale`` writes is no wish.
        """
        path = self._run.path / _WISH
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
    """Ask the launcher that runs ``run`` for another number of ranks; who that is.

    FXP520 where the folder is no run's; FXP109 where none runs it, or it may not have so many.
    """
    held = read_launcher_record(run)
    if held is None:
        raise error(
            "FXP109",
            where=f"scale {run.path}",
            why="no launcher runs it",
            fix="start it with fxpart train --nproc MIN:MAX --run DIR",
        )
    if not held.least <= ranks <= held.most:
        bounds = RankBounds(held.least, held.most)
        raise error(
            "FXP109",
            where=f"scale {run.path} {ranks}",
            why=f"it was started with --nproc {bounds}",
            fix="ask for a number in between, or start it again with other bounds",
        )
    try:
        write_atomically(run.path / _WISH, msgspec.json.encode(ScaleRequest(ranks)))
    except OSError as why:
        raise _unwritable(run.path, why) from why
    return held


def read_launcher_record(run: RunDir) -> LauncherRecord | None:
    """Who runs it now; None where nobody does. FXP520 where the folder is no run's."""
    path = run.path / _HELD
    try:
        with open_regular_file(path) as (file, _):
            if _lock(file.fileno(), shared=True):
                return None
            data = file.read(_MOST_BYTES)
    except FileNotFoundError as why:
        if run.path.is_dir():
            return None
        raise _unreadable(run.path, "there is no such folder") from why
    except OSError as why:
        raise _unreadable(path, why.strerror or str(why)) from why
    try:
        return from_json(data, LauncherRecord)
    except (ValueError, RecursionError, msgspec.MsgspecError) as why:
        raise _unreadable(path, str(why)) from why


def _lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether the file could be locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unreadable(path: Path, why: str) -> FxpartError:
    return error("FXP520", where=str(path), why=why, fix="give the folder of --run")


def _unwritable(path: Path, why: OSError) -> FxpartError:
    text = why.strerror or str(why)
    return error("FXP603", where=str(path), why=text, fix="give a writable --run folder")
