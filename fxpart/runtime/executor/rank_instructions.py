"""Preparation of one rank's actions.

Everything known before a step is computed here: the tensors of each message, the values that each
action reads, and when a microbatch's tensors are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from fxpart.diagnostics.flight_recorder import FlightRecorder, Mark
from fxpart.runtime.executor.executor import Executor
from fxpart.runtime.executor.instruction import (
    BackwardHooks,
    Instruction,
    StepInput,
    add_backward_hooks,
    do_nothing,
)
from fxpart.runtime.executor.rank_program import RankProgram
from fxpart.runtime.executor.recompute import Mode
from fxpart.runtime.executor.routes import Arrival, MessageRoutes
from fxpart.runtime.executor.split_backward import BackwardSplitter, WeightBackward
from fxpart.runtime.executor.stage_microbatch import BackwardRoots, StageMicrobatch
from fxpart.runtime.executor.stage_signature import StageSignature
from fxpart.runtime.executor.value_sender import LinkSender, ValueSender
from fxpart.runtime.gradients.tied_parameters import TiedGradientReducer
from fxpart.schedule.action import Action, ActionKind

_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W)  # Actions that add to a stage's gradients.
_ENDS = (ActionKind.B, ActionKind.I)  # Actions that free a microbatch's tensors.


class RankInstructions(Executor):
    """The instructions of one rank's step, and their shared state.

    losses, outputs (by name): per microbatch, for this rank's stages. halves: by stage, the
    splitter of its backwards.
    """

    def __init__(
        self,
        program: RankProgram,
        *,
        train: bool,
        keep_outputs: bool = False,
        on_failure: Callable[[BaseException], None] | None = None,
        hooks: BackwardHooks | None = None,
        threads: bool = False,
        recompute: Mapping[int, Mode] | None = None,
        offload: bool = False,
        events: FlightRecorder | None = None,
    ) -> None:
        """program: what the rank runs.

        on_failure, threads: see :class:`~fxpart.runtime.executor.executor.Executor`. hooks: hooks
        around backwards. recompute: stages that do not store their activations. offload: whether
        activations wait in host memory. events: the recorder of actions; None: a private one.
        """
        super().__init__(
            program.rank, program.schedule.stage_rank,
            FlightRecorder(program.rank, 64) if events is None else events,
            threads=threads, on_failure=on_failure,
        )  # fmt: skip
        spec, modules, schedule = program.spec, program.modules, program.schedule
        self._receivers, self._hooks, self._train = program.find_receivers, hooks, train
        self._runs = schedule.runs
        self._routes = MessageRoutes(program)
        found, again = self._routes.found, (recompute or {}) if train else {}
        self._signatures = {
            index: StageSignature.of(
                spec,
                spec.stages[index],
                module,
                found,
                keep_outputs,
                again.get(index, "none"),
                offload and train,
            )
            for index, module in modules.items()
        }
        self._cells: dict[tuple[int, int], StageMicrobatch] = {}
        self._weight_backwards: dict[tuple[int, int], WeightBackward | None] = {}
        self._sender = ValueSender(program.transport, program.rank, program.device)
        self._feed = StepInput((), (), (), ())
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[str, dict[int, torch.Tensor]] = {}
        self._tied_gradients = TiedGradientReducer(program)
        self._late_arrivals: list[Arrival] = []
        self.halves = {
            index: BackwardSplitter(
                module,
                self._tied_gradients.copies(index),
                self._signatures[index].keeping.recompute,
            )
            for index, module in modules.items()
        }
        self._prepared = self._instructions = self._prepare(schedule.ranks[program.rank])

    def _prepare(self, actions: Sequence[Action]) -> list[Instruction]:
        last = {cell: i for i, a in enumerate(actions) for cell in self._find_read_cells(a)}
        unread = self._find_unread_outputs(actions)
        ends_of = {a.stage: i for i, a in enumerate(actions) if a.kind in _BACKWARDS}
        done: list[Instruction] = []
        for index, action in enumerate(actions):
            final = [cell for cell in self._find_read_cells(action) if last[cell] == index]
            if action.kind is ActionKind.F:
                instruction = self._prepare_forward(
                    action, self._outlives_backward(action, actions)
                )
            elif action.kind in (ActionKind.B, ActionKind.I):
                instruction = self._prepare_backward(action)
            elif action.kind is ActionKind.W:
                instruction = self._prepare_weights(action)
            elif action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                instruction = self._prepare_send(action)
            else:
                instruction = self._prepare_receive(action)
            if self._hooks is not None and action.kind in _BACKWARDS:
                ends = ends_of[action.stage] == index
                instruction = add_backward_hooks(instruction, self._hooks, ends=ends)
            if index in unread:
                instruction = self._add_output_release(instruction, unread[index])
            if final:
                instruction = self._add_cell_release(instruction, final)
            done.append(replace(instruction, mark=self._make_first_mark(instruction)))
        return done

    def halt(self) -> None:
        """Drop all tensors, and make only transfers."""
        super().halt()
        self._cells.clear()
        self._weight_backwards.clear()

    def _outlives_backward(self, forward: Action, actions: Sequence[Action]) -> bool:
        """Return whether a stage of this rank reads a forward's outputs only after its backward."""
        if not self._train:
            return False
        own = [(a.stage, a.kind) for a in actions if a.microbatch == forward.microbatch]
        ends = [at for at, (k, kind) in enumerate(own) if k == forward.stage and kind in _ENDS]
        users = {k for k, table in self._signatures.items() if forward.stage in table.producers}
        return bool(ends) and any(k in users and kind is ActionKind.F for k, kind in own[ends[0] :])

    def _is_local(self, stage: int, microbatch: int) -> bool:
        """Return whether this rank runs a microbatch on a stage."""
        return self._stage_rank[stage] == self.rank and self._runs(stage, microbatch)

    def _find_read_cells(self, action: Action) -> list[tuple[int, int]]:
        """Return the (stage, microbatch) pairs that an action may read: own and local peers'."""
        if action.kind is ActionKind.W:  # Its inputs are stored separately.
            return []
        table, found = self._signatures[action.stage], [action.stage]
        if action.kind is ActionKind.F:
            found += [p for p in table.producers if self._is_local(p, action.microbatch)]
        elif action.kind in (ActionKind.B, ActionKind.I):
            found += [c for c in table.consumers if self._is_local(c, action.microbatch)]
        return [(stage, action.microbatch) for stage in found]

    def _add_cell_release(
        self, instruction: Instruction, final: list[tuple[int, int]]
    ) -> Instruction:
        """Return the instruction with the tensors dropped that no later action reads."""
        inner, cells = instruction.do, self._cells

        def do() -> None:
            inner()
            for cell in final:
                cells.pop(cell, None)

        return replace(instruction, do=do)

    def _find_unread_outputs(self, actions: Sequence[Action]) -> dict[int, list[tuple[int, int]]]:
        """Return by position the pairs whose outputs are dropped, as no later action reads them."""
        last: dict[tuple[int, int], int] = {}
        for index, action in enumerate(actions):
            if action.kind is ActionKind.F:
                last |= dict.fromkeys(self._find_read_cells(action), index)
            elif action.kind is ActionKind.SEND_F:
                last[action.stage, action.microbatch] = index
        found: dict[int, list[tuple[int, int]]] = {}
        for cell, index in last.items():
            if self._signatures[cell[0]].keeping.drops_outputs:
                found.setdefault(index, []).append(cell)
        return found

    def _add_output_release(
        self, instruction: Instruction, unread: list[tuple[int, int]]
    ) -> Instruction:
        """Return the instruction with the outputs dropped that no later action reads."""
        inner, cells = instruction.do, self._cells

        def do() -> None:
            inner()
            for key in unread:
                cells[key].drop_outputs()

        return replace(instruction, do=do)

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
        targets = self._receivers(action.stage, action.peer)
        return self.events.mark(
            str(action), "send", stage=action.stage, microbatch=action.microbatch, peer=targets[0]
        ) if targets else None  # fmt: skip

    def _make_start_mark(self, action: Action) -> Mark:
        """Return the event that an action has all its inputs."""
        return self.events.mark(str(action), stage=action.stage, microbatch=action.microbatch)

    def _make_wait_marks(self, action: Action, arrivals: Sequence[Arrival]) -> list[Mark | None]:
        """Return for each arrival the event of waiting for its sender; None if it equals the
        previous.

        The first is None, too: the executor writes it before the action.
        """
        marks: list[Mark | None] = []
        for at, (inbox, *_) in enumerate(arrivals):
            again = at == 0 or arrivals[at - 1][0].source == inbox.source
            marks.append(None if again else self._make_wait_mark(action, inbox.source))
        return marks

    def _make_wait_mark(self, action: Action, rank: int) -> Mark:
        return self.events.mark(
            str(action), "wait", stage=action.stage, microbatch=action.microbatch, peer=rank
        )

    def _prepare_receive(self, action: Action) -> Instruction:
        """Prepare a receive: it is posted here at the latest, and awaited by its computation."""
        post = self._routes.posting(action) or do_nothing
        return Instruction(action, (), post, post)

    def _prepare_forward(self, action: Action, outlives_backward: bool) -> Instruction:
        table, microbatch = self._signatures[action.stage], action.microbatch
        arrivals = self._routes.arrivals(
            ActionKind.SEND_F, action.stage, microbatch, table.producers
        )
        own = [
            (producer, self._routes.values[producer, action.stage])
            for producer in table.producers
            if self._is_local(producer, microbatch)
        ]
        cells, write = self._cells, self.events.write
        waits, begins = self._make_wait_marks(action, arrivals), self._make_start_mark(action)

        def do() -> None:
            feed, cell = self._feed, StageMicrobatch(table)
            cell.outlives_backward = outlives_backward
            for position, name in table.user:
                cell.inputs[position] = feed.inputs[microbatch][name]
            for (inbox, place, carried), mark in zip(arrivals, waits, strict=True):
                if mark is not None:
                    write(mark)
                for link, tensor in zip(carried, inbox.take(place), strict=True):
                    cell.inputs[link.input] = tensor
            if arrivals:
                self.began = write(begins)
            for producer, carried in own:
                for link in carried:
                    value = cells[producer, microbatch].value(link, forward=True)
                    cell.inputs[link.input] = value.detach()
            cell.forward(feed.keys[microbatch], train=self._train, step=feed)
            cells[action.stage, microbatch] = cell
            if table.loss is not None:
                self.losses[microbatch] = cell.outputs[table.loss].detach()
            for name, position in table.kept:
                self.outputs.setdefault(name, {})[microbatch] = cell.outputs[position].detach()

        return Instruction(action, arrivals, do, _make_drop(arrivals))

    def _prepare_backward(self, action: Action) -> Instruction:
        stage, microbatch, tied_gradients = action.stage, action.microbatch, self._tied_gradients
        table, cells = self._signatures[stage], self._cells
        tied, tied_arrivals = (
            tied_gradients.is_tied_stage(stage),
            tied_gradients.arrivals(stage, microbatch),
        )
        # An owner without own gradients still collects those of other stages.
        if not (table.trains or tied):
            return Instruction(action, (), do_nothing, do_nothing)
        arrivals = self._routes.arrivals(ActionKind.SEND_B, stage, microbatch, table.consumers)
        own = [
            (consumer, self._routes.returns[consumer, stage])
            for consumer in table.consumers
            if self._is_local(consumer, microbatch)
        ]
        self._late_arrivals += tied_gradients.arrivals(stage, microbatch, late=True)
        halves = self.halves[stage] if action.kind is ActionKind.I else None
        write, begins = self.events.write, self._make_start_mark(action)
        waits = self._make_wait_marks(action, (*arrivals, *tied_arrivals))
        tied_waits = [mark for mark in waits[len(arrivals) :] if mark is not None][:1]

        def do() -> None:
            cell, roots = cells[stage, microbatch], BackwardRoots(table)
            for (inbox, place, carried), mark in zip(arrivals, waits, strict=False):
                if mark is not None:
                    write(mark)
                for link, tensor in zip(carried, inbox.take(place), strict=True):
                    roots.add(link, tensor)
            for consumer, carried in own:
                for link in carried:
                    roots.add(link, cells[consumer, microbatch].value(link, forward=False))
            if table.loss is not None:
                roots.add_loss(cell.outputs[table.loss], self._feed.weights[microbatch])
            if tied:
                for mark in tied_waits:
                    write(mark)
                roots.add_shared(tied_gradients.receive_roots(stage, microbatch))
            if waits:
                self.began = write(begins)
            if halves is None:
                cell.backward(roots)
            else:
                self._weight_backwards[stage, microbatch] = cell.backward_inputs(roots, halves)
            if tied:
                tied_gradients.send_sums(stage, microbatch)

        drop = _make_drop((*arrivals, *tied_arrivals))

        def communicate() -> None:
            tied_gradients.skip(stage, microbatch)
            drop()

        return Instruction(action, (*arrivals, *tied_arrivals), do, communicate)

    def _prepare_weights(self, action: Action) -> Instruction:
        key, rests = (action.stage, action.microbatch), self._weight_backwards

        def do() -> None:
            rest = rests.pop(key, None)
            if rest is not None:
                rest.run()

        return Instruction(action, (), do, do_nothing)

    def _prepare_send(self, action: Action) -> Instruction:
        assert action.peer is not None
        carried, targets = self._routes.carried(action), self._receivers(action.stage, action.peer)
        if not carried or not targets:
            return Instruction(action, (), do_nothing)
        forward = action.kind is ActionKind.SEND_F
        sender = LinkSender(self._sender, carried, targets, forward=forward)
        key, microbatch = (action.stage, action.microbatch), action.microbatch

        def do() -> None:
            sender.send(self._cells[key], self._feed.sizes[microbatch])

        def communicate() -> None:
            sender.send_zeros(self._feed.sizes[microbatch])

        return Instruction(action, (), do, communicate)


def _make_drop(arrivals: tuple[Arrival, ...]) -> Callable[[], None]:
    def drop() -> None:
        for inbox, place, _ in arrivals:
            inbox.drop(place)

    return drop
