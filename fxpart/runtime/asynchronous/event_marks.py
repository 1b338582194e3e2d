"""Flight recorder marks of one asynchronous stage, built once."""

from __future__ import annotations

from collections.abc import Sequence

from fxpart.diagnostics.flight_recorder import FlightRecorder, Mark
from fxpart.diagnostics.rank_event import Phase


class StageEventMarks:
    """Flight recorder marks of one stage.

    :func:`~fxpart.diagnostics.flight_recorder_format.set_event_microbatch` adds the microbatch.
    forward, backward: by the stage that is waited for. sends, returns: by the stage that receives.
    """

    def __init__(self, events: FlightRecorder, stage: int, ranks: Sequence[int]) -> None:
        """Build the marks. ranks: of all stages of this mesh rank."""

        def mark(action: str, peer: int) -> Mark:
            phase: Phase = "wait" if action in ("F", "B") else "send"
            return events.mark(
                f"{stage}{action}#", phase, stage=stage, microbatch=0, peer=ranks[peer]
            )

        stages = range(len(ranks))
        self.forward = [mark("F", peer) for peer in stages]
        self.backward = [mark("B", peer) for peer in stages]
        self.sends = [mark("SEND_F", peer) for peer in stages]
        self.returns = [mark("SEND_B", peer) for peer in stages]
        self.forward_begins = events.mark(f"{stage}F#", stage=stage, microbatch=0)
        self.backward_begins = events.mark(f"{stage}B#", stage=stage, microbatch=0)
        self.updates = events.mark("the update after microbatch #", stage=stage, microbatch=0)
