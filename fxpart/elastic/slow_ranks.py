"""Ranks that have become slow: told by those that run, in a file of the run, to their launcher."""

from __future__ import annotations

import msgspec

from fxpart.bounded import from_json, read_bytes
from fxpart.elastic.cache import write
from fxpart.errors import error
from fxpart.rundir import RunDir

_NAME = "slow.json"
_MOST_BYTES = 1 << 20


class SlowRanks(msgspec.Struct, frozen=True):
    """How long each rank computes in a step.

    step: when it was told. seconds, past: by rank, now and the best that it did before
    (:class:`fxpart.runtime.slow.Pace`). slow: the ranks that are slow; none where it is over.
    """

    step: int
    seconds: dict[int, float]
    past: dict[int, float]
    slow: tuple[int, ...]


def tell_slow(run: RunDir, found: SlowRanks) -> None:
    """Leave it for the launcher. FXP603 where the folder cannot be written."""
    try:
        write(run.path / _NAME, msgspec.json.encode(found))
    except OSError as why:
        raise error(
            "FXP603", where=str(run.path), why=why.strerror or str(why),
            fix="give a writable --run folder",
        ) from why  # fmt: skip


def told_slow(run: RunDir) -> SlowRanks | None:
    """What was told last; None where nothing was, or it is not what ranks write."""
    try:
        found = from_json(read_bytes(run.path / _NAME, _MOST_BYTES), SlowRanks)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return found if all(0 < s < float("inf") for s in _numbers(found)) else None


def forget_slow(run: RunDir) -> None:
    """What an earlier launcher's ranks told is over."""
    (run.path / _NAME).unlink(missing_ok=True)


def _numbers(found: SlowRanks) -> list[float]:
    return [*found.seconds.values(), *found.past.values()]
