"""Ranks that have become slow: told by those that run, in a file of the run, to their launcher."""

from __future__ import annotations

import msgspec

from fxpart.checkpoint.run_directory import RunDir
from fxpart.elastic.plan_cache import write_atomically
from fxpart.errors import error
from fxpart.files import from_json, read_bytes

_NAME = "slow.json"
_MOST_BYTES = 1 << 20


class SlowRankReport(msgspec.Struct, frozen=True):
    """How long each rank computes in a step.

    step: when it was told. seconds, past: by rank, now and the best that it did before
    (:class:`fxpart.runtime.monitor.straggler_detector.StragglerDetector`). slow: the ranks that are
    slow; none where it is over.
    """

    step: int
    seconds: dict[int, float]
    past: dict[int, float]
    slow: tuple[int, ...]


def write_slow_rank_report(run: RunDir, found: SlowRankReport) -> None:
    """Leave it for the launcher. FXP603 where the folder cannot be written."""
    try:
        write_atomically(run.path / _NAME, msgspec.json.encode(found))
    except OSError as why:
        raise error(
            "FXP603", where=str(run.path), why=why.strerror or str(why),
            fix="give a writable --run folder",
        ) from why  # fmt: skip


def read_slow_rank_report(run: RunDir) -> SlowRankReport | None:
    """What was told last; None where nothing was, or it is not what ranks write."""
    try:
        found = from_json(read_bytes(run.path / _NAME, _MOST_BYTES), SlowRankReport)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return found if all(0 < s < float("inf") for s in _numbers(found)) else None


def forget_slow(run: RunDir) -> None:
    """What an earlier launcher's ranks told is over."""
    (run.path / _NAME).unlink(missing_ok=True)


def _numbers(found: SlowRankReport) -> list[float]:
    return [*found.seconds.values(), *found.past.values()]
