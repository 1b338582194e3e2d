"""The interpreter of one rank's actions: a list of prepared calls, run once per step.

If a stage fails, the rank continues its transfers with zeros instead of results, so that no other
rank waits forever. The step then raises on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import monotonic_ns

import torch
from torch import nn

from fxpart.diagnostics.flight_recorder import FlightRecorder, Mark
from fxpart.errors import FxpartError
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.executor.instruction import (
    BackwardHooks,
    Instruction,
    StageFailure,
    StepInput,
)
from fxpart.runtime.executor.rank_instructions import RankInstructions
from fxpart.runtime.executor.recompute import Mode
from fxpart.runtime.transport.agreement import make_lost_peer_error
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError, Transport
from fxpart.schedule.action import ActionKind, Schedule

__all__ = ["BackwardHooks", "Executor", "Instruction", "StageFailure", "StepInput"]


class Executor(RankInstructions):
    """Runs one rank of a lowered schedule.

    After :meth:`run`: ``losses`` and ``outputs`` (by name) per microbatch for this rank's stages,
    ``failure`` if a stage raised, ``busy``: nanoseconds of computation as seen by the host.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: torch.device,
        *,
        train: bool,
        keep_outputs: bool = False,
        on_failure: Callable[[BaseException], None] | None = None,
        hooks: BackwardHooks | None = None,
        threads: bool = False,
        recompute: Mapping[int, Mode] | None = None,
        events: FlightRecorder | None = None,
    ) -> None:
        """modules: the rank's stage modules by stage index.

        on_failure: called when a stage has raised. hooks: hooks around backwards. threads: the
        other mesh ranks of the stage are in this process, so a missing peer has failed there and no
        connection is lost. recompute: stages that do not store their activations. events: the
        recorder of actions; None: a private one.
        """
        super().__init__(
            spec, modules, schedule, rank, transport, device,
            train=train, keep_outputs=keep_outputs, hooks=hooks, recompute=recompute,
            events=events,
        )  # fmt: skip
        self._on_failure = on_failure
        self._threads = threads
        self.position = 0
        self.failure: StageFailure | None = None
        self.lost = False
        self.busy = 0
        self._instructions = self._prepared
        self._marks = [self._make_first_mark(each) for each in self._prepared]
        self._computes = [each.action.kind.is_compute for each in self._prepared]
        # A rank that waits for no peer may start while the ranks compare their batches. Exceptions:
        # a forward that changes buffers, because a rejected batch must not change any, and a
        # forward with collectives, because a rank that makes another call would never join.
        self._alone = int(
            bool(self._instructions)
            and self._instructions[0].action.kind is ActionKind.F
            and not self._instructions[0].awaits
            and not any(True for _ in modules[self._instructions[0].action.stage].buffers())
            and (threads or "mesh" not in vars(modules[self._instructions[0].action.stage]))
        )

    def wrap(self, hooks: Callable[[Instruction], Instruction] | None) -> None:
        """Replace each instruction by ``around(instruction)`` from the next step on; None: undo."""
        self._instructions = self._prepared if hooks is None else list(map(hooks, self._prepared))

    def run(self, feed: StepInput, gate: Callable[[], None]) -> Iterator[None]:
        """Execute one step; yield whenever a message has not arrived (in-process only).

        gate: returns once all ranks have agreed to run the same step, or raises; nothing is sent or
        received before. Raises FXP503 or FXP504 if a transfer fails. A failure of the own stage is
        stored in ``failure``.
        """
        self._feed = feed
        self.losses, self.outputs, self.failure = {}, {}, None
        self._cells.clear()
        self._weight_backwards.clear()
        self.busy, write, marks, computes = 0, self.events.write, self._marks, self._computes
        for position, instruction in enumerate(self._instructions):
            self.position = position
            if position == self._alone:
                gate()
                for inbox in self._routes.inboxes:
                    inbox.begin(feed.sizes)
                self._tied_gradients.begin(feed.sizes)
            for inbox, index, _ in instruction.awaits:
                while not inbox.ready(index):
                    yield
            mark = marks[position]
            if mark is not None:
                self.began = write(mark)
            try:
                self._execute(instruction)
            except (TransferTimeoutError, PeerLostError) as cause:
                raise self._make_lost_error(instruction, cause) from cause
            if computes[position]:
                self.busy += monotonic_ns() - self.began
        if len(self._instructions) <= self._alone:
            gate()
        yield from self._complete_tied_gradients()
        self.position = len(self._instructions)

    def _complete_tied_gradients(self) -> Iterator[None]:
        """Complete gradients of tied parameters whose last parts arrive after all actions."""
        for inbox, index, _ in self._late_arrivals:
            while not inbox.ready(index):
                yield
        if self._late_arrivals:
            peer = self._late_arrivals[0][0].source
            self.events.put("tied gradients", "wait", peer=peer)
        try:
            if self.failure is None:
                self._tied_gradients.add_late_sums()
            for inbox, index, _ in self._late_arrivals:
                inbox.drop(index)
        except (TransferTimeoutError, PeerLostError) as cause:
            raise self._make_lost_error(self._instructions[-1], cause) from cause

    def _make_first_mark(self, instruction: Instruction) -> Mark | None:
        """Return the event before an action; a receive has none, as it is only posted."""
        action = instruction.action
        if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            return None
        if instruction.awaits:
            return self._make_wait_mark(action, instruction.awaits[0][0].source)
        if action.kind.is_compute:
            return self._make_start_mark(action)
        assert action.peer is not None
        return self.events.mark(
            str(action), "send", stage=action.stage, microbatch=action.microbatch,
            peer=self._stage_rank[action.peer],
        )  # fmt: skip

    def _execute(self, instruction: Instruction) -> None:
        """Run the instruction; after a failure, only the transfers that other ranks wait for."""
        if self.failure is None:
            try:
                instruction.do()
                return
            except Exception as cause:
                if isinstance(cause, (TransferTimeoutError, PeerLostError)) and not self._threads:
                    raise
                self.failure = StageFailure(self.rank, instruction.action, cause)
                self.events.put(str(instruction.action), "failed", stage=instruction.action.stage)
                self._cells.clear()
                self._weight_backwards.clear()
                if self._on_failure is not None:
                    self._on_failure(cause)
        instruction.communicate()

    def finish(self) -> None:
        """Wait for the last sends; call it when all ranks have received their messages."""
        while self._sending:
            self._transport.wait(self._sending.popleft())
        self._tied_gradients.finish()

    def waiting(self) -> str:
        """Return the action that has not run, for a message."""
        return str(self._instructions[self.position].action)

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
