"""What one rank left of a generation, and what that says by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxpart.diagnostics.failure_attribution import FailureAttribution, attribute_failure
from fxpart.diagnostics.failure_record import FailureRecord
from fxpart.diagnostics.flight_recorder import FlightRecorderDump
from fxpart.diagnostics.rank_event import FAULTS, LEFT, NOBODY, STEP, RankEvent

How = Literal["failed", "followed", "left", "silent"]


@dataclass(frozen=True)
class RankTraces:
    """What one rank left. problems: of files that cannot be read."""

    rank: int
    ring: FlightRecorderDump | None = None
    failure: FailureRecord | None = None
    problems: tuple[str, ...] = ()

    @property
    def last(self) -> RankEvent | None:
        """What it did last, before it said that it failed."""
        events = self.ring.events if self.ring is not None else ()
        return next((event for event in reversed(events) if event.phase not in FAULTS), None)

    @property
    def fault(self) -> RankEvent | None:
        """What failed since its last whole step, if it noted that."""
        for event in reversed(self.ring.events if self.ring is not None else ()):
            if event.phase in FAULTS:
                return event
            if event.phase == "end" and event.what == STEP:
                break
        return None

    @property
    def time(self) -> int:
        """When it was last heard of, in nanoseconds since 1970; its failure if it had one."""
        if self.failure is not None:
            return self.failure.time
        if self.ring is None:
            return 0
        return self.ring.events[-1].nanoseconds if self.ring.events else self.ring.began

    @property
    def blame(self) -> FailureAttribution | None:
        """Whom its failure is about, as it wrote or at least noted it; None without a failure."""
        if self.failure is not None:
            return attribute_failure(self.failure)
        fault = self.fault
        if fault is None:
            return None
        about = self.rank if fault.peer == NOBODY else fault.peer
        return FailureAttribution((about,), gone=fault.phase == "lost")

    @property
    def how(self) -> How:
        """It failed by itself, followed another's failure, left as it should, or said nothing."""
        found = self.blame
        if found is not None:
            return "failed" if self.rank in found.ranks else "followed"
        last = self.last
        return "left" if last is not None and (last.what, last.phase) == (LEFT, "end") else "silent"

    def newest(self, count: int) -> tuple[RankEvent, ...]:
        """Its last events, at most so many, oldest first."""
        events = self.ring.events if self.ring is not None else ()
        return events[max(0, len(events) - count) :]

    @property
    def awaited(self) -> int:
        """The rank that it waited for at last; ALL, or NOBODY."""
        last = self.last
        return last.peer if last is not None and last.phase in ("wait", "send") else NOBODY
