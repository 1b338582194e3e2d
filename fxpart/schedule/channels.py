"""Channels of transfers, and the proof that their operations cannot deadlock.

A channel is what a transport uses as one queue: NCCL runs the operations of a communicator in the
order of the calls, and a send ends only when its receive runs. The runtime gives each route
(sending rank, receiving rank, direction) a channel of its own. The proof takes the operations that
each rank issues for a schedule and assumes the strictest transport:

- all operations of a rank on one channel, sends and receives, whoever the peer is, run one after
  the other in the order in which they were issued;
- a transfer needs its send and its receive at the heads of their queues at the same time;
- a rank waits for each send before it continues, and for each receive before it uses the tensor.

A transport that buffers messages or has more queues only removes waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from fxpart.errors import Problem
from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.consistency import make_unsafe_problem
from fxpart.schedule.dependence import Dependence, get_transfer_send
from fxpart.schedule.rendezvous import execute

FORWARD_DIRECTION, BACKWARD_DIRECTION, TIED_DIRECTION = "forward", "backward", "tied"
_SENDS = {ActionKind.SEND_F: FORWARD_DIRECTION, ActionKind.SEND_B: BACKWARD_DIRECTION}
_BACKWARDS = (ActionKind.B, ActionKind.I)

# From the sending rank, the receiving rank and the direction to the channel.
ChannelAssignment = Callable[[int, int, str], Hashable]


def assign_route_channel(source: int, target: int, direction: str) -> Hashable:
    """Return the channel that the runtime uses: one for each route."""
    return (source, target, direction)


@dataclass(frozen=True)
class TiedTransfer:
    """A tied parameter's gradient that one stage sends to another after each backward.

    late: the target adds it at the end of the step, not in its backward.
    """

    source: int
    target: int
    late: bool = False


class Operation(NamedTuple):
    """A rank starts one end of a transfer. transfer: its name, equal on both ends."""

    transfer: str
    channel: Hashable
    peer: int
    is_send: bool


class Wait(NamedTuple):
    """A rank continues only when a transfer is complete."""

    transfer: str


RankOperations = list[Operation | Wait]


def find_channel_problems(
    schedule: Schedule,
    dependence: Dependence,
    *,
    tied: Iterable[TiedTransfer] = (),
    assign: ChannelAssignment = assign_route_channel,
    ahead: int = 0,
) -> list[Problem]:
    """Return why a lowered schedule's transfers may deadlock or be mismatched on their channels.

    ahead: receives that a rank posts beyond the next one of a sender; 0 on devices.
    """
    ranks = list_operations(schedule, dependence, tied=tied, assign=assign, ahead=ahead)
    return find_order_problems(ranks) or find_deadlock_problems(ranks)


def find_order_problems(ranks: Sequence[RankOperations]) -> list[Problem]:
    """Return a problem for each channel whose two ends do not have the same order."""
    ends: dict[tuple[Hashable, int, int], tuple[list[Operation], list[Operation]]] = {}
    for rank, operations in enumerate(ranks):
        for each in operations:
            if isinstance(each, Operation):
                low, high = sorted((rank, each.peer))
                pair = ends.setdefault((each.channel, low, high), ([], []))
                pair[rank == high].append(each)
    found: list[Problem] = []
    for (channel, low, high), (first, second) in ends.items():
        for number, (a, b) in enumerate(zip_longest(first, second)):
            if a is None or b is None or a.transfer != b.transfer or a.is_send == b.is_send:
                where = f"channel {channel}, operation {number} between ranks {low} and {high}"
                why = f"Rank {low} {_describe(a)}, and rank {high} {_describe(b)}."
                fix = "Use a channel for each sender, receiver and direction."
                found.append(make_unsafe_problem(where, why, fix))
                break
    return found


def find_deadlock_problems(ranks: Sequence[RankOperations]) -> list[Problem]:
    """Return a problem for each rank that cannot reach the end of its operations."""
    run = _ChannelExecution(ranks)
    run.advance()
    found: list[Problem] = []
    for rank, operations in enumerate(ranks):
        if run.done[rank] < len(operations):
            stuck = operations[run.done[rank]]
            assert isinstance(stuck, Wait), "only waits block a rank"
            where = f"rank {rank}, waiting for {stuck.transfer}"
            before = run.find_blocker(rank, stuck.transfer)
            why = (
                f"Its channel is blocked by {before}."
                if before
                else "The other rank does not reach its end of the transfer."
            )
            found.append(
                make_unsafe_problem(
                    where, why, "Use a channel for each sender, receiver and direction."
                )
            )
    return found


def list_operations(
    schedule: Schedule,
    dependence: Dependence,
    *,
    tied: Iterable[TiedTransfer] = (),
    assign: ChannelAssignment = assign_route_channel,
    ahead: int = 0,
) -> list[RankOperations]:
    """Return by rank the operations that the runtime issues for a lowered schedule, in order.

    A receive is issued at its action or earlier: up to ``ahead`` receives beyond the last one that
    a computation of the rank has taken from the sender.
    """
    ties = tuple(tied)
    listers = [
        _RankLister(schedule, dependence, ties, assign, ahead, rank)
        for rank in range(len(schedule.ranks))
    ]
    for source, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind in _SENDS:
                assert action.peer is not None
                target = listers[schedule.stage_rank[action.peer]]
                target.expect(str(action.plain), source, _SENDS[action.kind])
            for tie in _find_ties(ties, action):
                target = listers[schedule.stage_rank[tie.target]]
                target.expect(_name_tied(tie, action.microbatch), source, TIED_DIRECTION)
    return [lister.list_operations() for lister in listers]


def _describe(operation: Operation | None) -> str:
    if operation is None:
        return "has no more operations"
    return f"{'sends' if operation.is_send else 'receives'} {operation.transfer}"


@dataclass
class _Inbox:
    """What a rank receives from another in one direction, in the order of the sends."""

    transfers: list[Operation] = field(default_factory=list)
    posted: int = 0


class _RankLister:
    """Lists the operations of one rank."""

    def __init__(
        self,
        schedule: Schedule,
        dependence: Dependence,
        ties: tuple[TiedTransfer, ...],
        assign: ChannelAssignment,
        ahead: int,
        rank: int,
    ) -> None:
        self._schedule, self._dependence = schedule, dependence
        self._stage_rank, self._ties = schedule.stage_rank, ties
        self._assign, self._ahead, self._rank = assign, ahead, rank
        self._found: RankOperations = []
        self._inboxes: dict[tuple[int, str], _Inbox] = {}
        self._places: dict[str, tuple[_Inbox, int]] = {}
        self._sent: list[str] = []  # Tied gradients, in order.
        self._window = self._count_window() if ties else 0

    def list_operations(self) -> RankOperations:
        """Return the operations."""
        for inbox in self._inboxes.values():
            self._post(inbox, self._ahead)
        for action in self._schedule.ranks[self._rank]:
            if action.kind in _SENDS:
                assert action.peer is not None
                self._send(str(action.plain), self._stage_rank[action.peer], _SENDS[action.kind])
                self._found.append(Wait(str(action.plain)))
            elif not action.kind.is_compute:
                inbox, place = self._places[str(get_transfer_send(action.plain))]
                self._post(inbox, place + 1)
            else:
                self._compute(action.plain)
        for inbox in self._inboxes.values():  # Late tied gradients.
            self._post(inbox, len(inbox.transfers))
            self._found += [Wait(each.transfer) for each in inbox.transfers]
        self._found += map(Wait, self._sent)
        return self._found

    def expect(self, transfer: str, source: int, direction: str) -> None:
        """Add a transfer that another rank sends to this one, in the order of its sends."""
        if source == self._rank:
            return
        inbox = self._inboxes.setdefault((source, direction), _Inbox())
        channel = self._assign(source, self._rank, direction)
        self._places[transfer] = (inbox, len(inbox.transfers))
        inbox.transfers.append(Operation(transfer, channel, source, is_send=False))

    def _post(self, inbox: _Inbox, count: int) -> None:
        self._found += inbox.transfers[inbox.posted : count]
        inbox.posted = max(inbox.posted, min(count, len(inbox.transfers)))

    def _send(self, transfer: str, target: int, direction: str) -> None:
        channel = self._assign(self._rank, target, direction)
        self._found.append(Operation(transfer, channel, target, is_send=True))

    def _compute(self, action: Action) -> None:
        needs = [
            str(get_transfer_send(need))
            for need in self._dependence.requires(action)
            if not need.kind.is_compute
        ]
        if action.kind in _BACKWARDS:
            needs += [
                _name_tied(tie, action.microbatch)
                for tie in self._ties
                if tie.target == action.stage and not tie.late
            ]
        places = [self._places[name] for name in needs if name in self._places]
        for inbox, place in places:
            self._post(inbox, place + 1)
        for inbox, place in places:
            self._found.append(Wait(inbox.transfers[place].transfer))
            self._post(inbox, place + 1 + self._ahead)
        for tie in _find_ties(self._ties, action):
            target = self._stage_rank[tie.target]
            if target != self._rank:
                self._send_tied(_name_tied(tie, action.microbatch), target)

    def _send_tied(self, transfer: str, target: int) -> None:
        late = any(tie.late for tie in self._ties)
        if not late and len(self._sent) >= self._window:
            self._found.append(Wait(self._sent[len(self._sent) - self._window]))
        self._send(transfer, target, TIED_DIRECTION)
        self._sent.append(transfer)

    def _count_window(self) -> int:
        """Return how many tied gradients of this rank may be in flight before it waits.

        In one valid order of the schedule, the most between the oldest that has not been received
        and the newest.
        """
        untaken: dict[str, int] = {}
        count, most = 0, 1
        for action in execute(self._schedule.ranks, self._stage_rank).order:
            if action.kind not in _BACKWARDS:
                continue
            for tie in self._ties:
                if tie.target == action.stage:
                    untaken.pop(_name_tied(tie, action.microbatch), None)
            if self._stage_rank[action.stage] != self._rank:
                continue
            for tie in _find_ties(self._ties, action):
                if self._stage_rank[tie.target] != self._rank:
                    untaken[_name_tied(tie, action.microbatch)] = count
                    count += 1
                    most = max(most, count - next(iter(untaken.values())))
        return most


def _find_ties(ties: Sequence[TiedTransfer], action: Action) -> Sequence[TiedTransfer]:
    """Return what a backward sends of tied gradients."""
    if not ties or action.kind not in _BACKWARDS:
        return ()
    return [tie for tie in ties if tie.source == action.stage]


def _name_tied(tie: TiedTransfer, microbatch: int) -> str:
    return f"tied gradients {tie.source}>{tie.target} of microbatch {microbatch}"


class _ChannelExecution:
    """Runs the ranks' operations until none can move. done: operations passed, by rank."""

    def __init__(self, ranks: Sequence[RankOperations]) -> None:
        self.done = [0] * len(ranks)
        self._ranks = ranks
        self._complete: set[str] = set()
        self._queues: defaultdict[tuple[int, Hashable], deque[Operation]] = defaultdict(deque)

    def advance(self) -> None:
        """Run all ranks as far as they come; the result does not depend on who moves first."""
        active = list(range(len(self._ranks)))
        while active:
            rank = active.pop()
            operations = self._ranks[rank]
            while self.done[rank] < len(operations):
                each = operations[self.done[rank]]
                if isinstance(each, Wait):
                    if each.transfer not in self._complete:
                        break
                else:
                    self._queues[rank, each.channel].append(each)
                    active += self._transfer(rank, each.channel)
                self.done[rank] += 1

    def find_blocker(self, rank: int, transfer: str) -> str:
        """Return the operation in front of a transfer's end on its queue; "" if none is."""
        for (owner, _), queue in self._queues.items():
            if owner == rank and transfer in [each.transfer for each in queue]:
                head = queue[0]
                return "" if head.transfer == transfer else f"{head.transfer}, issued before it"
        return ""

    def _transfer(self, rank: int, channel: Hashable) -> set[int]:
        """Complete what is at the heads of both ends; return the ranks that may continue."""
        moved: set[int] = set()
        waiting = [rank]
        while waiting:
            here = waiting.pop()
            queue = self._queues[here, channel]
            while queue:
                head = queue[0]
                other = self._queues[head.peer, channel]
                if not other or other[0].transfer != head.transfer or head.peer == here:
                    break
                queue.popleft()
                other.popleft()
                self._complete.add(head.transfer)
                moved |= {here, head.peer}
                waiting.append(head.peer)
        return moved
