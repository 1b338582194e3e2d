"""What must have happened before an action: the one definition of dependence.

The verifier, the simulator, the lowering and the executor all ask here. Stages form a directed
acyclic graph, not a chain: an edge says that values of one stage are read by a later one, and a
skip connection is an edge like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, ActionKind, RoundRobinSlots, Schedule, StageEdge


def edge_problems(stages: int, edges: Iterable[StageEdge]) -> tuple[Problem, ...]:
    """What is wrong with the edges of a graph of that many stages (FXP901), if anything."""
    wanted = tuple(edges)
    found = [
        Problem("FXP901", f"edge {e.source} -> {e.target}", "it does not lead to a later stage", "")
        for e in wanted
        if not 0 <= e.source < e.target < stages
    ]
    twice = Counter((e.source, e.target) for e in wanted)
    found += [
        Problem("FXP901", f"edge {source} -> {target}", "it is given twice", "merge the two")
        for (source, target), count in twice.items()
        if count > 1
    ]
    return tuple(found)


def _checked(stages: int, edges: Iterable[StageEdge]) -> tuple[StageEdge, ...]:
    wanted = tuple(edges)
    problems = edge_problems(stages, wanted)
    if problems:
        raise FxpartError(problems)
    return wanted


def chain(stages: int) -> tuple[StageEdge, ...]:
    """The edges of a plain pipeline: each stage to the next."""
    return tuple(StageEdge(k, k + 1) for k in range(stages - 1))


def depths(stages: int, edges: Iterable[StageEdge]) -> tuple[int, ...]:
    """For each stage the number of stages on the longest path from it to an end, itself included.

    In a chain of S stages, S - s. 1F1B keeps so many microbatches in flight; on parallel branches
    that is fewer than the count of later stages. Raises FXP901 on edges that are no stage graph.
    """
    found = [1] * stages
    for edge in sorted(_checked(stages, edges), key=lambda e: -e.source):
        found[edge.source] = max(found[edge.source], found[edge.target] + 1)
    return tuple(found)


@dataclass(frozen=True)
class Dependence:
    """The stage graph on its ranks, and the answers that follow from it.

    stage_rank: the rank of each stage. producers, consumers: per stage the stages whose values it
    reads, and that read its values (ascending). gradient_consumers, gradient_producers: the same
    over the edges that gradients come back on. split: the (stage, microbatch) pairs whose
    backward is split into I and W. turns: where there are copies of stages, per stage when its turn
    is; a microbatch meets only the copy whose turn it is. period: the
    microbatches of one step, where the schedule is of several; turns begin anew with each.
    """

    stages: int
    stage_rank: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    gradient_producers: tuple[tuple[int, ...], ...]
    gradient_consumers: tuple[tuple[int, ...], ...]
    trains: bool = True
    split: frozenset[tuple[int, int]] = frozenset()
    turns: tuple[RoundRobinSlots, ...] = ()
    period: int | None = None

    @classmethod
    def build(
        cls,
        stage_rank: Sequence[int],
        edges: Iterable[StageEdge],
        *,
        trains: bool = True,
        split: frozenset[tuple[int, int]] = frozenset(),
        turns: Sequence[RoundRobinSlots] = (),
        period: int | None = None,
    ) -> Dependence:
        """The graph with these edges; raises FXP901 if they are no stage graph."""
        stages = len(stage_rank)
        wanted = _checked(stages, edges)
        back = tuple(e for e in wanted if e.backward and trains)

        def into(some: Sequence[StageEdge]) -> tuple[tuple[int, ...], ...]:
            every = ((e.source for e in some if e.target == k) for k in range(stages))
            return tuple(tuple(sorted(each)) for each in every)

        def out(some: Sequence[StageEdge]) -> tuple[tuple[int, ...], ...]:
            every = ((e.target for e in some if e.source == k) for k in range(stages))
            return tuple(tuple(sorted(each)) for each in every)

        return cls(
            stages, tuple(stage_rank), into(wanted), out(wanted), into(back), out(back),
            trains, split, tuple(turns), period,
        )  # fmt: skip

    @classmethod
    def of(
        cls, schedule: Schedule, edges: Iterable[StageEdge], *, period: int | None = None
    ) -> Dependence:
        """The graph of a schedule: its ranks, edges and copies, and which backwards it splits."""
        split = frozenset(
            (a.stage, a.microbatch)
            for actions in schedule.ranks
            for a in actions
            if a.kind is ActionKind.I
        )
        alone = not schedule.replicas
        turns = () if alone else tuple(schedule.turn(k) for k in range(schedule.stages))
        return cls.build(
            schedule.stage_rank, edges, trains=schedule.trains, split=split, turns=turns,
            period=period,
        )  # fmt: skip

    def meet(self, stages: tuple[int, ...], microbatch: int) -> tuple[int, ...]:
        """Those of the stages that do the microbatch: all, but for copies whose turn it is not."""
        if not self.turns:
            return stages
        number = microbatch if self.period is None else microbatch % self.period
        return tuple(k for k in stages if self.turns[k].has(number))

    def backward(self, stage: int, microbatch: int) -> Action:
        """The action that yields the stage's input gradients: B, or I where it is split."""
        kind = ActionKind.I if (stage, microbatch) in self.split else ActionKind.B
        return Action(stage, kind, microbatch)

    def computes(self, action: Action) -> tuple[Action, ...]:
        """The computations, on whatever rank, whose results a computation uses."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.F:
            producers = self.meet(self.producers[stage], microbatch)
            return tuple(Action(k, ActionKind.F, microbatch) for k in producers)
        if action.kind is ActionKind.W:
            return (Action(stage, ActionKind.I, microbatch),)
        assert action.kind in (ActionKind.B, ActionKind.I), "computes() is about computations"
        consumers = self.meet(self.gradient_consumers[stage], microbatch)
        gradients = tuple(self.backward(k, microbatch) for k in consumers)
        return (Action(stage, ActionKind.F, microbatch), *gradients)

    def requires(self, action: Action) -> tuple[Action, ...]:
        """What must be done before the action may start, once the schedule is lowered.

        A computation needs what :meth:`computes` says, from its own rank directly and from others
        as a receive on its own rank. A send needs its computation, a receive the peer's send.
        """
        if not action.kind.is_compute:
            return (self._cause(action),)
        rank = self.stage_rank[action.stage]
        return tuple(
            need if self.stage_rank[need.stage] == rank else self._receive(action, need)
            for need in self.computes(action)
        )

    def transfers(self, action: Action) -> tuple[tuple[Action, Action], ...]:
        """The (send, receive) pairs that carry a computation's results to other ranks."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.F:
            targets, send, receive = self.consumers[stage], ActionKind.SEND_F, ActionKind.RECV_F
        elif action.kind in (ActionKind.B, ActionKind.I):
            targets, send, receive = (
                self.gradient_producers[stage],
                ActionKind.SEND_B,
                ActionKind.RECV_B,
            )
        else:
            return ()
        return tuple(
            (Action(stage, send, microbatch, k), Action(k, receive, microbatch, stage))
            for k in self.meet(targets, microbatch)
            if self.stage_rank[k] != self.stage_rank[stage]
        )

    def _cause(self, transfer: Action) -> Action:
        if transfer.kind is ActionKind.SEND_F:
            return Action(transfer.stage, ActionKind.F, transfer.microbatch)
        if transfer.kind is ActionKind.SEND_B:
            return self.backward(transfer.stage, transfer.microbatch)
        return get_transfer_partner(transfer)

    @staticmethod
    def _receive(action: Action, need: Action) -> Action:
        kind = ActionKind.RECV_F if need.kind is ActionKind.F else ActionKind.RECV_B
        return Action(action.stage, kind, action.microbatch, need.stage)


_OTHER_END = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_B: ActionKind.SEND_B,
}


def get_transfer_partner(transfer: Action) -> Action:
    """The other end of a transfer: the receive of a send, the send of a receive."""
    assert transfer.peer is not None, "only a transfer has a partner"
    return Action(transfer.peer, _OTHER_END[transfer.kind], transfer.microbatch, transfer.stage)


def get_transfer_send(transfer: Action) -> Action:
    """The send of a transfer, given either end."""
    return (
        transfer
        if transfer.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        else get_transfer_partner(transfer)
    )
