"""The executor of all schedules: runs prepared actions in order.

If a stage fails, its executor continues the transfers with zeros instead of results, so that no
other rank waits forever. All ranks then raise the same error, at the end of the step or, without
flushes, some calls later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic_ns

from fxpart.diagnostics.flight_recorder import FlightRecorder
from fxpart.errors import FxpartError
from fxpart.runtime.executor.instruction import Instruction, StageFailure
from fxpart.runtime.transport.agreement import make_lost_peer_error
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError
from fxpart.schedule.action import Action, ActionKind


class Executor:
    """Runs instructions: those of one rank's step, or of one stage of an asynchronous pipeline.

    failure: the exception of a stage, if one was raised. halted: whether only transfers are made,
    after a failure of an own stage or an earlier one. lost: whether the transfers with other ranks
    are broken, so that no further ones are made. busy:
    nanoseconds of computation as seen by the host. began: when the inputs of the newest action were
    complete, in monotonic nanoseconds. position: instructions completed. doing: the newest action.
    """

    def __init__(
        self,
        rank: int,
        stage_rank: Sequence[int],
        events: FlightRecorder,
        *,
        threads: bool,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """stage_rank: the rank of each stage.

        threads: the other mesh ranks of a stage are in this process, so a missing peer has failed
        there and no connection is lost. on_failure: called when a stage has raised.
        """
        self.rank = rank
        self.events = events
        self.failure: StageFailure | None = None
        self.halted = self.lost = False
        self.busy = self.began = self.position = 0
        self.doing = Action(0, ActionKind.F, 0)
        self._stage_rank = stage_rank
        self._threads = threads
        self._on_failure = on_failure

    def execute(self, instructions: Iterable[Instruction]) -> Iterator[None]:
        """Execute instructions; yield whenever a message has not arrived (in-process only).

        Raises FXP503 or FXP504 if a transfer fails. A failure of an own stage is stored in
        ``failure``, and the remaining instructions only communicate.
        """
        write = self.events.write
        for instruction in instructions:
            self.doing = instruction.action
            for inbox, index, _ in instruction.awaits:
                while not inbox.ready(index):
                    yield
            if instruction.mark is not None:
                self.began = write(instruction.mark)
            try:
                self._execute(instruction)
            except (TransferTimeoutError, PeerLostError) as cause:
                raise self._make_lost_error(instruction, cause) from cause
            if instruction.action.kind.is_compute:
                self.busy += monotonic_ns() - self.began
            self.position += 1

    def _execute(self, instruction: Instruction) -> None:
        """Run the instruction; after a failure, only the transfers that other ranks wait for."""
        if not self.halted:
            try:
                instruction.do()
                return
            except Exception as cause:
                lost = isinstance(cause, (TransferTimeoutError, PeerLostError))
                if (lost and not self._threads) or self.lost:
                    raise
                self.fail(cause)
        instruction.communicate()

    def fail(self, cause: Exception) -> None:
        """Record the first failure; from here on only transfers are made."""
        if self.failure is None:
            self.failure = StageFailure(self.rank, self.doing, cause)
            self.events.put(str(self.doing), "failed", stage=self.doing.stage)
        self.halt()
        if self._on_failure is not None:
            self._on_failure(cause)

    def halt(self) -> None:
        """Make only transfers, with zeros in place of results."""
        self.halted = True

    def _make_lost_error(
        self, instruction: Instruction, cause: TransferTimeoutError | PeerLostError
    ) -> FxpartError:
        """Return the error of a failed transfer: the action of this rank and the peers it waited
        for.
        """
        self.lost = True
        action = instruction.action
        peers = {inbox.source for inbox, *_ in instruction.awaits}
        if action.peer is not None:
            peers.add(self._stage_rank[action.peer])
        what = f"stage {action.stage}, action {action}, microbatch {action.microbatch}"
        for peer in sorted(peers):
            stages = [str(s) for s, rank in enumerate(self._stage_rank) if rank == peer]
            what += f", waiting for rank {peer} (stage {', '.join(stages)})"
        return make_lost_peer_error(self.rank, what, cause)
