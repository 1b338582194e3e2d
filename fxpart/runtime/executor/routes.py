"""The content and destination of each message of a step, and the routes between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fxpart.program.edges import ValueEdge, find_stage_edges, find_value_edges
from fxpart.program.spec import ProgramSpec
from fxpart.runtime.executor.rank_program import RankProgram
from fxpart.runtime.executor.receive_queue import ReceiveQueue, StageMessage
from fxpart.runtime.gradients.tied_parameters import find_tied_parameters
from fxpart.runtime.mesh.mesh_ranks import Ranks, find_receivers
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, STATE, Route
from fxpart.schedule.action import Action, ActionKind

Arrival = tuple[ReceiveQueue, int, tuple[ValueEdge, ...]]


class MessageRoutes:
    """A rank's messages.

    found: all links of the program. inboxes: one for each sending rank and direction. values: the
    links from a stage to another. returns: the links whose gradients a stage sends to another.
    """

    def __init__(self, program: RankProgram) -> None:
        """Prepare the messages. program: what the rank runs."""
        spec, schedule, rank = program.spec, program.schedule, program.rank
        self.found = find_value_edges(spec)
        self.values: dict[tuple[int, int], tuple[ValueEdge, ...]] = {}
        self.returns: dict[tuple[int, int], tuple[ValueEdge, ...]] = {}
        for link in self.found:
            pair = (link.source, link.target)
            self.values[pair] = (*self.values.get(pair, ()), link)
            if link.gradient:
                pair = (link.target, link.back)
                self.returns[pair] = (*self.returns.get(pair, ()), link)
        self.inboxes: list[ReceiveQueue] = []
        self._messages: dict[tuple[ActionKind, int, int, int], tuple[ReceiveQueue, int]] = {}
        for source, actions in enumerate(schedule.ranks):
            if source != rank:
                for kind, channel in ((ActionKind.SEND_F, FORWARD), (ActionKind.SEND_B, BACKWARD)):
                    mine = [
                        a
                        for a in actions
                        if a.kind is kind
                        and a.peer is not None
                        and schedule.stage_rank[a.peer] == rank
                        and self.carried(a)
                    ]
                    messages = [StageMessage(self.carried(a), a.microbatch) for a in mine]
                    if messages:
                        inbox = ReceiveQueue(
                            program.transport, source, rank, channel, program.device, messages,
                            orders=True,
                        )  # fmt: skip
                        self._add(inbox, mine)

    def carried(self, send: Action) -> tuple[ValueEdge, ...]:
        """Return the links whose values (or gradients) a send carries."""
        assert send.peer is not None
        kept = self.values if send.kind is ActionKind.SEND_F else self.returns
        return kept.get((send.stage, send.peer), ())

    def arrivals(
        self, kind: ActionKind, stage: int, microbatch: int, peers: Sequence[int]
    ) -> tuple[Arrival, ...]:
        """Return other ranks' messages for a microbatch of the stage, ordered by ``peers``."""
        found = []
        for peer in peers:
            message = self._messages.get((kind, peer, stage, microbatch))
            if message is not None:
                found.append((*message, self.carried(Action(peer, kind, microbatch, stage))))
        return tuple(found)

    def posting(self, receive: Action) -> Callable[[], None] | None:
        """Return a call that posts the message of a receive; None if it carries nothing."""
        kind = ActionKind.SEND_F if receive.kind is ActionKind.RECV_F else ActionKind.SEND_B
        assert receive.peer is not None
        found = self._messages.get((kind, receive.peer, receive.stage, receive.microbatch))
        if found is None:
            return None
        inbox, place = found
        return lambda: inbox.ensure(place + 1)

    def _add(self, inbox: ReceiveQueue, sends: Sequence[Action]) -> None:
        self.inboxes.append(inbox)
        for place, send in enumerate(sends):
            assert send.peer is not None
            self._messages[send.kind, send.stage, send.peer, send.microbatch] = (inbox, place)


def find_routes(spec: ProgramSpec, ranks: Ranks) -> list[Route]:
    """Return the routes of any schedule of the program, sorted, equal on all ranks.

    ranks: of each stage and mesh rank. Values go from stage to stage, gradients back. Stages that
    share a parameter, tied or as replicas, exchange its gradients with its owner.
    """
    return place_routes((*_find_boundary_routes(spec), *_find_shared_routes(spec)), ranks)


def place_routes(stage_routes: Iterable[tuple[int, int, int]], ranks: Ranks) -> list[Route]:
    """Return the routes between ranks of routes between stages (from stage, to stage, channel)."""
    found = {
        Route(source, target, channel)
        for start, end, channel in stage_routes
        for mesh_rank, source in enumerate(ranks[start])
        for target in find_receivers(ranks, start, end, mesh_rank)
    }
    return sorted(route for route in found if route.source != route.target)


def _find_boundary_routes(spec: ProgramSpec) -> Iterator[tuple[int, int, int]]:
    """Yield (from stage, to stage, channel) of values and of their gradients."""
    for edge in find_stage_edges(spec):
        yield edge.source, edge.target, FORWARD
        if edge.backward:
            yield edge.target, edge.source, BACKWARD


def _find_shared_routes(spec: ProgramSpec) -> Iterator[tuple[int, int, int]]:
    """Yield (from stage, to stage, channel) of what stages with a common parameter exchange."""
    users: dict[str, tuple[int, set[int]]] = {}
    for stage in spec.stages:
        for state in stage.state:
            if state.requires_grad:
                users.setdefault(state.name, (state.owner, set()))[1].add(stage.index)
    for owner, stages in users.values():
        for user in stages - {owner}:
            yield user, owner, STATE
            yield owner, user, STATE
    for item in find_tied_parameters(spec):
        for source, target in item.routes.items():
            yield source, target, STATE
