"""The proof that an asynchronous pipeline's transfers cannot deadlock on their channels.

An asynchronous pipeline has no action lists: each stage runs forwards and backwards in a fixed
order until it is flushed. The operations of a stage follow from that order, and repeat. So the
proof lists them for a run that reaches the steady state and is then flushed, and uses the model of
:mod:`fxpart.schedule.channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from fxpart.errors import Problem
from fxpart.schedule.channels import (
    BACKWARD_DIRECTION,
    FORWARD_DIRECTION,
    ChannelAssignment,
    Operation,
    RankOperations,
    Wait,
    assign_route_channel,
    find_deadlock_problems,
    find_order_problems,
)

Pair = tuple[int, int]  # from stage, to stage


@dataclass(frozen=True)
class AsyncTransfers:
    """What the stages of an asynchronous pipeline send, and how far they may be ahead.

    stage_rank: one stage per rank. forward, backward: pairs of stages that exchange a message for
    each microbatch. ahead: forwards of each stage before its first backward. posts: receives that
    are posted beyond those taken, from the receiving stage, the sending stage and whether the
    message is a backward one. window: messages in transit before the sender waits, likewise.
    """

    stage_rank: Sequence[int]
    forward: Sequence[Pair]
    backward: Sequence[Pair]
    ahead: Sequence[int]
    posts: Callable[[int, int, bool], int]
    window: Callable[[int, int, bool], int]
    assign: ChannelAssignment = assign_route_channel


def find_asynchronous_problems(transfers: AsyncTransfers) -> list[Problem]:
    """Return why the stages' transfers may deadlock or be mismatched on their channels."""
    ranks = list_asynchronous_operations(transfers)
    return find_order_problems(ranks) or find_deadlock_problems(ranks)


def count_microbatches(transfers: AsyncTransfers) -> int:
    """Return the microbatches of the run that is proved: until the steady state has repeated."""
    return 2 * max(transfers.ahead) + 4


def list_asynchronous_operations(transfers: AsyncTransfers) -> list[RankOperations]:
    """Return by rank the operations from an empty pipeline to its flush, in order."""
    count = count_microbatches(transfers)
    ranks: list[RankOperations] = [[] for _ in range(max(transfers.stage_rank) + 1)]
    for stage, rank in enumerate(transfers.stage_rank):
        ranks[rank] = _StageLister(transfers, stage).list_operations(count)
    return ranks


@dataclass
class _Link:
    """One direction between a stage and a peer, as seen by the stage."""

    peer: int
    pair: Pair
    direction: str
    channel: Hashable
    limit: int  # Receives beyond those taken, or messages in transit.
    used: int = 0  # Receives posted, or messages sent.
    last: int | None = None  # Receives that are posted at most, once the flush has begun.
    done: int = 0  # Messages taken.
    sent: list[str] = field(default_factory=list)

    def name(self, number: int) -> str:
        """Return the name of a message, equal on both ends."""
        return f"{self.direction} {self.pair[0]}>{self.pair[1]} of microbatch {number}"


class _StageLister:
    """Lists the operations of one stage."""

    def __init__(self, transfers: AsyncTransfers, stage: int) -> None:
        self._transfers, self._stage = transfers, stage
        self._found: RankOperations = []
        forward, backward = sorted(transfers.forward), sorted(transfers.backward, reverse=True)
        self._into = self._receives(forward, FORWARD_DIRECTION)
        self._back = self._receives(backward, BACKWARD_DIRECTION)
        self._out = self._sends(forward, FORWARD_DIRECTION)
        self._returns = self._sends(backward, BACKWARD_DIRECTION)

    def list_operations(self, count: int) -> RankOperations:
        """Return the operations of so many microbatches and the flush after them."""
        for link in (*self._into, *self._back):
            self._post(link, link.limit)
        ahead = self._transfers.ahead[self._stage]
        for number in range(count):
            self._run(self._into, self._out)
            if number - ahead + 1 >= 0:
                self._run(self._back, self._returns)
        self._flush(count, min(ahead - 1, count))
        return self._found

    def _flush(self, count: int, backwards: int) -> None:
        """Run the last backwards, and complete the receives that peers do not need."""
        for link in (*self._into, *self._back):
            self._post(link, count + 1)
            link.last = link.used
        for _ in range(backwards):
            self._run(self._back, self._returns)
        posts, ahead = self._transfers.posts, self._transfers.ahead
        for link in self._out:
            self._end(link, count + posts(link.peer, self._stage, False))
        for link in self._returns:
            taken = max(0, count - ahead[link.peer] + 1)
            self._end(link, max(taken + posts(link.peer, self._stage, True), count + 1))
        for link in (*self._into, *self._back):
            while link.done < link.used:
                self._take(link)
        self._found += [Wait(each) for link in (*self._out, *self._returns) for each in link.sent]

    def _run(self, receives: Sequence[_Link], sends: Sequence[_Link]) -> None:
        """Run a forward or a backward."""
        for link in receives:
            self._post(link, link.done + 1)
        for link in receives:
            self._take(link)
        for link in sends:
            self._send(link)

    def _post(self, link: _Link, count: int) -> None:
        count = count if link.last is None else min(count, link.last)
        while link.used < count:
            rank = self._transfers.stage_rank[link.peer]
            name = link.name(link.used)
            self._found.append(Operation(name, link.channel, rank, is_send=False))
            link.used += 1

    def _take(self, link: _Link) -> None:
        self._found.append(Wait(link.name(link.done)))
        link.done += 1
        self._post(link, link.done + link.limit)

    def _send(self, link: _Link) -> None:
        if link.used >= link.limit:
            self._found.append(Wait(link.sent[link.used - link.limit]))
        rank, name = self._transfers.stage_rank[link.peer], link.name(link.used)
        self._found.append(Operation(name, link.channel, rank, is_send=True))
        link.sent.append(name)
        link.used += 1

    def _end(self, link: _Link, posted: int) -> None:
        while link.used < posted:
            self._send(link)

    def _receives(self, pairs: Sequence[Pair], direction: str) -> list[_Link]:
        """Return the links on which the stage receives, in the order of its receives."""
        mine = [pair for pair in pairs if pair[1] == self._stage]
        return [self._link(pair, direction, self._transfers.posts) for pair in mine]

    def _sends(self, pairs: Sequence[Pair], direction: str) -> list[_Link]:
        """Return the links on which the stage sends, in the order of its sends."""
        mine = [pair for pair in pairs if pair[0] == self._stage]
        return [self._link(pair, direction, self._transfers.window) for pair in mine]

    def _link(self, pair: Pair, direction: str, limit: Callable[[int, int, bool], int]) -> _Link:
        source, target = (self._transfers.stage_rank[stage] for stage in pair)
        peer = pair[0] if pair[1] == self._stage else pair[1]
        channel = self._transfers.assign(source, target, direction)
        size = limit(pair[1], pair[0], direction == BACKWARD_DIRECTION)
        return _Link(peer, pair, direction, channel, size)
