"""Recorded events of a rank: action, peer and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["begin", "end", "wait", "send", "failed", "lost"]
PHASES: tuple[Phase, ...] = get_args(Phase)
FAULTS: tuple[Phase, ...] = ("failed", "lost")
NO_RANK, ALL = -1, -2  # in place of a peer
STEP = "the step"  # action that ends with a step
LEFT = "the training"  # action that ends when a rank ends normally


@dataclass(frozen=True, slots=True)
class RankEvent:
    """One recorded event.

    number: from 1, by process. nanoseconds: of the host's monotonic clock in memory; since 1970
    when read from a file. what: an action ("0F3") or a description ("the optimizer"). phase: it
    begins (its inputs are there), ends, waits for ``peer``, sends to it, has failed (by itself, or
    because of ``peer``), or failed because ``peer`` has ended. stage, microbatch: -1 if none. peer:
    a rank, NO_RANK, or ALL.
    """

    number: int
    nanoseconds: int
    step: int
    what: str
    phase: Phase
    stage: int = -1
    microbatch: int = -1
    peer: int = NO_RANK

    @property
    def words(self) -> str:
        """Text of the event: "0F3 of step 118 waits for rank 2"."""
        peer_name = "all ranks" if self.peer == ALL else f"rank {self.peer}"
        done = {
            "begin": "began",
            "end": "ended",
            "wait": "waits" if self.peer == NO_RANK else f"waits for {peer_name}",
            "send": "is sent" if self.peer == NO_RANK else f"is sent to {peer_name}",
            "failed": "failed" if self.peer == NO_RANK else f"failed because of {peer_name}",
            "lost": f"failed: {peer_name} has ended",
        }
        return f"{self.what} of step {self.step} {done[self.phase]}"
