"""Dependencies between actions: the one definition that all of fxpart uses.

The verifier, the simulator, the lowering and the executor all query it. Stages form a directed
acyclic graph: an edge means that a later stage reads values of an earlier one, and a skip
connection is an ordinary edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, ActionKind, RoundRobinSlots, Schedule, StageEdge


def edge_problems(stages: int, edges: Iterable[StageEdge]) -> tuple[Problem, ...]:
    """Return the problems of a stage graph's edges (FXP901)."""
    wanted = tuple(edges)
    found = [
        Problem(
            "FXP901",
            f"edge {e.source} -> {e.target}",
            "The edge does not lead to a later stage.",
            "",
        )
        for e in wanted
        if not 0 <= e.source < e.target < stages
    ]
    twice = Counter((e.source, e.target) for e in wanted)
    found += [
        Problem(
            "FXP901",
            f"edge {source} -> {target}",
            "The edge occurs twice.",
            "Remove the duplicate.",
        )
        for (source, target), count in twice.items()
        if count > 1
    ]
    return tuple(found)


def _check(stages: int, edges: Iterable[StageEdge]) -> tuple[StageEdge, ...]:
    wanted = tuple(edges)
    problems = edge_problems(stages, wanted)
    if problems:
        raise FxpartError(problems)
    return wanted


def chain(stages: int) -> tuple[StageEdge, ...]:
    """Return the edges of a chain: each stage to the next."""
    return tuple(StageEdge(k, k + 1) for k in range(stages - 1))


def depths(stages: int, edges: Iterable[StageEdge]) -> tuple[int, ...]:
    """Return for each stage the number of stages on the longest path to an end, itself included.

    In a chain of S stages, S - s. This is the number of microbatches that 1F1B keeps in flight; on
    parallel branches it is smaller than the number of later stages. Raises FXP901 if the edges are
    not a stage graph.
    """
    found = [1] * stages
    for edge in sorted(_check(stages, edges), key=lambda e: -e.source):
        found[edge.source] = max(found[edge.source], found[edge.target] + 1)
    return tuple(found)


@dataclass(frozen=True)
class Dependence:
    """The stage graph on its ranks, with dependency queries.

    stage_rank: the rank of each stage. producers, consumers: per stage the stages whose values it
    reads, and those that read its values (ascending). gradient_consumers, gradient_producers: the
    same for edges with gradients. split: the (stage, microbatch) pairs whose backward is split into
    I and W. slots: with replicated stages, the round-robin slots of each stage; a microbatch runs
    on one replica of each group. period: microbatches per step if the schedule has several steps;
    the round-robin cycle restarts with each step.
    """

    stages: int
    stage_rank: tuple[int, ...]
    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    gradient_producers: tuple[tuple[int, ...], ...]
    gradient_consumers: tuple[tuple[int, ...], ...]
    trains: bool = True
    split: frozenset[tuple[int, int]] = frozenset()
    slots: tuple[RoundRobinSlots, ...] = ()
    period: int | None = None

    @classmethod
    def build(
        cls,
        stage_rank: Sequence[int],
        edges: Iterable[StageEdge],
        *,
        trains: bool = True,
        split: frozenset[tuple[int, int]] = frozenset(),
        slots: Sequence[RoundRobinSlots] = (),
        period: int | None = None,
    ) -> Dependence:
        """Return the stage graph with these edges; raise FXP901 if they are not a stage graph."""
        stages = len(stage_rank)
        wanted = _check(stages, edges)
        back = tuple(e for e in wanted if e.backward and trains)

        def into(some: Sequence[StageEdge]) -> tuple[tuple[int, ...], ...]:
            every = ((e.source for e in some if e.target == k) for k in range(stages))
            return tuple(tuple(sorted(each)) for each in every)

        def out(some: Sequence[StageEdge]) -> tuple[tuple[int, ...], ...]:
            every = ((e.target for e in some if e.source == k) for k in range(stages))
            return tuple(tuple(sorted(each)) for each in every)

        return cls(
            stages, tuple(stage_rank), into(wanted), out(wanted), into(back), out(back),
            trains, split, tuple(slots), period,
        )  # fmt: skip

    @classmethod
    def of(
        cls, schedule: Schedule, edges: Iterable[StageEdge], *, period: int | None = None
    ) -> Dependence:
        """Return the stage graph of a schedule: its ranks, edges, replicas and split backwards."""
        split = frozenset(
            (a.stage, a.microbatch)
            for actions in schedule.ranks
            for a in actions
            if a.kind is ActionKind.I
        )
        alone = not schedule.replicas
        slots = () if alone else tuple(schedule.get_slots(k) for k in range(schedule.stages))
        return cls.build(
            schedule.stage_rank, edges, trains=schedule.trains, split=split, slots=slots,
            period=period,
        )  # fmt: skip

    def select_replicas(self, stages: tuple[int, ...], microbatch: int) -> tuple[int, ...]:
        """Return those of the stages that run the microbatch."""
        if not self.slots:
            return stages
        number = microbatch if self.period is None else microbatch % self.period
        return tuple(k for k in stages if self.slots[k].has(number))

    def backward(self, stage: int, microbatch: int) -> Action:
        """Return the action that yields the stage's input gradients: B, or I if the backward is
        split."""
        kind = ActionKind.I if (stage, microbatch) in self.split else ActionKind.B
        return Action(stage, kind, microbatch)

    def computes(self, action: Action) -> tuple[Action, ...]:
        """Return the computations, on any rank, whose results a computation uses."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.F:
            producers = self.select_replicas(self.producers[stage], microbatch)
            return tuple(Action(k, ActionKind.F, microbatch) for k in producers)
        if action.kind is ActionKind.W:
            return (Action(stage, ActionKind.I, microbatch),)
        assert action.kind in (ActionKind.B, ActionKind.I), "computes() requires a computation"
        consumers = self.select_replicas(self.gradient_consumers[stage], microbatch)
        gradients = tuple(self.backward(k, microbatch) for k in consumers)
        return (Action(stage, ActionKind.F, microbatch), *gradients)

    def requires(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that must complete before the action, in a lowered schedule.

        A computation requires the results of :meth:`computes`: directly from its own rank, through
        a receive from other ranks. A send requires its computation, a receive the peer's send.
        """
        if not action.kind.is_compute:
            return (self._cause(action),)
        rank = self.stage_rank[action.stage]
        return tuple(
            need if self.stage_rank[need.stage] == rank else self._receive(action, need)
            for need in self.computes(action)
        )

    def transfers(self, action: Action) -> tuple[tuple[Action, Action], ...]:
        """Return the (send, receive) pairs that carry a computation's results to other ranks."""
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
            for k in self.select_replicas(targets, microbatch)
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
    """Return the other end of a transfer: the receive of a send, the send of a receive."""
    assert transfer.peer is not None, "only a transfer has a partner"
    return Action(transfer.peer, _OTHER_END[transfer.kind], transfer.microbatch, transfer.stage)


def get_transfer_send(transfer: Action) -> Action:
    """Return the send of a transfer, given either end."""
    return (
        transfer
        if transfer.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        else get_transfer_partner(transfer)
    )
