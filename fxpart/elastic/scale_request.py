"""Requests for another number of ranks during a run: ``fxpart scale RUN N``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from fxpart.checkpoint.run_directory import RunDir, make_unwritable_error
from fxpart.checkpoint.run_lock import (
    LauncherRecord,
    RunLock,
    lock_folder,
    read_launcher_record,
)
from fxpart.elastic.plan_cache import write_atomically
from fxpart.elastic.rank_bounds import RankBounds
from fxpart.errors import error
from fxpart.files import from_json, read_bytes

_REQUEST_FILE = "scale.json"
_MOST_BYTES = 1 << 16


class ScaleRequest(msgspec.Struct, frozen=True):
    """The requested number of ranks, from the next step on."""

    ranks: int


@contextmanager
def lock_run(run: RunDir, bounds: RankBounds) -> Iterator[LauncherLock]:
    """Hold the exclusive lock of a run while the block runs.

    FXP521 if another process holds it; FXP603 if the folder cannot be written.
    """
    lock = lock_folder(run)
    try:
        (run.path / _REQUEST_FILE).unlink(missing_ok=True)  # of an earlier launcher
        yield LauncherLock(run, bounds, lock)
    finally:
        lock.close()


class LauncherLock:
    """The launcher's side: publishes the number of ranks, and reads requests."""

    def __init__(self, run: RunDir, bounds: RankBounds, lock: RunLock) -> None:
        """Wrap the lock that the launcher holds."""
        self._run, self._bounds, self._lock = run, bounds, lock
        self._seen: tuple[int, int] | None = None

    def publish_ranks(self, ranks: int) -> None:
        """Publish the current number of ranks."""
        self._lock.renew()
        self._lock.publish(self._bounds.least, self._bounds.most, ranks, "launcher")

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
        raise make_unwritable_error(run.path, why) from why
    return launcher
