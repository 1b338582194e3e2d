"""The executor of one rank's step: a list of prepared calls, run once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

from fxpart.runtime.executor.instruction import Instruction, StepInput
from fxpart.runtime.executor.rank_instructions import RankInstructions
from fxpart.schedule.action import Action, ActionKind


class StepExecutor(RankInstructions):
    """Runs one rank of a lowered schedule, step by step.

    After a step: ``losses`` and ``outputs`` (by name) per microbatch for this rank's stages, and
    ``failure`` if a stage raised.
    """

    @cached_property
    def _alone(self) -> int:
        """Instructions that may run while the ranks compare their batches: one or none.

        A rank that waits for no peer may start. Exceptions: a forward that writes state, because a
        rejected batch must not change any, and a forward with collectives, because a rank that
        makes another call would never join.
        """
        first = self._prepared[0] if self._prepared else None
        if first is None or first.action.kind is not ActionKind.F or first.awaits:
            return 0
        signature = self._signatures[first.action.stage]
        collectives = "mesh" in vars(signature.module)
        return int(not signature.writes_state and (self._threads or not collectives))

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
        self.losses, self.outputs, self.failure, self.halted = {}, {}, None, False
        self._cells.clear()
        self._weight_backwards.clear()
        self.busy = self.position = 0
        return self.execute(self._list_step(feed, gate))

    def _list_step(self, feed: StepInput, gate: Callable[[], None]) -> Iterator[Instruction]:
        for position, instruction in enumerate(self._instructions):
            if position == self._alone:
                gate()
                for inbox in self._routes.inboxes:
                    inbox.begin(feed.sizes)
                self._tied_gradients.begin(feed.sizes)
            yield instruction
        if len(self._instructions) <= self._alone:
            gate()
        yield self._late_gradients

    @cached_property
    def _late_gradients(self) -> Instruction:
        """Complete gradients of tied parameters, with parts that arrive after all actions."""
        arrivals = tuple(self._late_arrivals)
        drops = [partial(inbox.drop, index) for inbox, index, _ in arrivals]

        def communicate() -> None:
            for drop in drops:
                drop()

        def do() -> None:
            self._tied_gradients.add_late_sums()
            communicate()

        mark = None
        if arrivals:
            mark = self.events.mark("tied gradients", "wait", peer=arrivals[0][0].source)
        last = self._prepared[-1].action if self._prepared else self.doing
        action = Action(last.stage, ActionKind.REDUCE, last.microbatch)
        return Instruction(action, arrivals, do, communicate, mark)

    def finish(self) -> None:
        """Wait for the last sends; call it when all ranks have received their messages."""
        self._sender.finish()
        self._tied_gradients.finish()
