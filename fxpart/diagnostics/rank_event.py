"""What is noted of a rank: what it did, with whom, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["begin", "end", "wait", "send", "failed", "lost"]
PHASES: tuple[Phase, ...] = get_args(Phase)
FAULTS: tuple[Phase, ...] = ("failed", "lost")
NOBODY, ALL = -1, -2  # in the place of a peer
STEP = "the step"  # what ends when a step is over
LEFT = "the training"  # what a rank notes to have ended when it leaves as it should


@dataclass(frozen=True, slots=True)
class RankEvent:
    """One thing that a rank noted.

    number: from 1, by process. nanoseconds: of the machine's monotonic clock in a ring; since 1970
    where it was read from a file. what: an action ("0F3") or words ("the optimizer"). phase: it
    begins (what it needs is there), ends, waits for ``peer``, sends to it, has failed (by itself,
    or since ``peer`` did), or failed since ``peer`` is gone. stage, microbatch: -1 where it is of
    none. peer: a rank, NOBODY, or ALL.
    """

    number: int
    nanoseconds: int
    step: int
    what: str
    phase: Phase
    stage: int = -1
    microbatch: int = -1
    peer: int = NOBODY

    @property
    def words(self) -> str:
        """As a person reads it: "0F3 of step 118 waits for rank 2"."""
        whom = "all ranks" if self.peer == ALL else f"rank {self.peer}"
        done = {
            "begin": "began",
            "end": "ended",
            "wait": "waits" if self.peer == NOBODY else f"waits for {whom}",
            "send": "is sent" if self.peer == NOBODY else f"goes to {whom}",
            "failed": "failed" if self.peer == NOBODY else f"failed after {whom}",
            "lost": f"failed: {whom} is gone",
        }
        return f"{self.what} of step {self.step} {done[self.phase]}"
