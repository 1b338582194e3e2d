"""Files of one rank in a generation, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxpart.diagnostics.failure_record import FailureAttribution, FailureRecord, attribute_failure
from fxpart.diagnostics.flight_recorder import FlightRecorderDump
from fxpart.diagnostics.rank_event import FAULTS, LEFT, NO_RANK, STEP, RankEvent

How = Literal["failed", "followed", "left", "silent"]


@dataclass(frozen=True)
class RankTraces:
    """Files of one rank. problems: of files that cannot be read."""

    rank: int
    ring: FlightRecorderDump | None = None
    failure: FailureRecord | None = None
    problems: tuple[str, ...] = ()

    @property
    def last(self) -> RankEvent | None:
        """Last event before a failure."""
        events = self.ring.events if self.ring is not None else ()
        return next((event for event in reversed(events) if event.phase not in FAULTS), None)

    @property
    def fault(self) -> RankEvent | None:
        """Failure event since the last complete step, if it was recorded."""
        for event in reversed(self.ring.events if self.ring is not None else ()):
            if event.phase in FAULTS:
                return event
            if event.phase == "end" and event.what == STEP:
                break
        return None

    @property
    def time(self) -> int:
        """Time of the failure, or of the last event, in nanoseconds since 1970."""
        if self.failure is not None:
            return self.failure.time
        if self.ring is None:
            return 0
        return self.ring.events[-1].nanoseconds if self.ring.events else self.ring.began

    @property
    def blame(self) -> FailureAttribution | None:
        """Attribution of the rank's failure, by its record or its event; None without a failure."""
        if self.failure is not None:
            return attribute_failure(self.failure)
        fault = self.fault
        if fault is None:
            return None
        blamed_rank = self.rank if fault.peer == NO_RANK else fault.peer
        return FailureAttribution((blamed_rank,), gone=fault.phase == "lost")

    @property
    def how(self) -> How:
        """How it ended: by its own failure, by another's, normally, or without a record."""
        found = self.blame
        if found is not None:
            return "failed" if self.rank in found.ranks else "followed"
        last = self.last
        return "left" if last is not None and (last.what, last.phase) == (LEFT, "end") else "silent"

    def newest(self, count: int) -> tuple[RankEvent, ...]:
        """Return the last ``count`` events, oldest first."""
        events = self.ring.events if self.ring is not None else ()
        return events[max(0, len(events) - count) :]

    @property
    def awaited(self) -> int:
        """The rank that it waited for last; ALL, or NO_RANK."""
        last = self.last
        return last.peer if last is not None and last.phase in ("wait", "send") else NO_RANK
