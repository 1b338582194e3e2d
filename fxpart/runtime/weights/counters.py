"""What a stage really read, counted while it runs, against what its schedule says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fxpart.errors import FxpartError, error


class MicrobatchWeightUse(NamedTuple):
    """What a microbatch read: updates in the weights of its forward, and when the two ran."""

    microbatch: int
    version: int
    forward: int
    backward: int


@dataclass(frozen=True)
class StageCounters:
    """Of one stage: computations and updates since the stream began anew, and updates in all.

    recent: what the newest microbatches that went backward read, oldest first; see ``RECENT``.
    """

    forwards: int
    backwards: int
    updates: int
    recent: tuple[MicrobatchWeightUse, ...]


RECENT = 256  # microbatches; enough to look at, little to keep


def make_recent_log() -> deque[MicrobatchWeightUse]:
    """An empty record of the newest microbatches."""
    return deque(maxlen=RECENT)


def make_schedule_mismatch_error(
    stage: int, microbatch: int, what: str, expected: int, found: int
) -> FxpartError:
    """The error of a stage that did not keep to its schedule: FXP900."""
    return error(
        "FXP900",
        where=f"stage {stage}, microbatch {microbatch}",
        why=f"{what}: {expected} by the schedule, {found} found",
        fix="",
    )
