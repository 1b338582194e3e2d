"""Report of slow ranks, written into the run's folder for the launcher."""

from __future__ import annotations

import msgspec

from fxpart.checkpoint.run_directory import RunDir
from fxpart.elastic.plan_cache import write_atomically
from fxpart.errors import error
from fxpart.files import from_json, read_bytes

_NAME = "slow.json"
_MOST_BYTES = 1 << 20


class SlowRankReport(msgspec.Struct, frozen=True):
    """Computation time per step of each rank.

    step: of the report. seconds, past: by rank, current and best earlier
    (:class:`fxpart.runtime.monitor.straggler_detector.StragglerDetector`). slow: the slow ranks;
    empty if there are none any more.
    """

    step: int
    seconds: dict[int, float]
    past: dict[int, float]
    slow: tuple[int, ...]


def write_slow_rank_report(run: RunDir, found: SlowRankReport) -> None:
    """Write the report for the launcher. FXP603 if the folder cannot be written."""
    try:
        write_atomically(run.path / _NAME, msgspec.json.encode(found))
    except OSError as why:
        raise error(
            "FXP603", where=str(run.path), why=why.strerror or str(why),
            fix="use a writable --run folder",
        ) from why  # fmt: skip


def read_slow_rank_report(run: RunDir) -> SlowRankReport | None:
    """Return the last report, or None if there is none or it is invalid."""
    try:
        found = from_json(read_bytes(run.path / _NAME, _MOST_BYTES), SlowRankReport)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return found if all(0 < s < float("inf") for s in _list_seconds(found)) else None


def delete_slow_rank_report(run: RunDir) -> None:
    """Delete the report of an earlier launcher's ranks."""
    (run.path / _NAME).unlink(missing_ok=True)


def _list_seconds(found: SlowRankReport) -> list[float]:
    return [*found.seconds.values(), *found.past.values()]
