"""The mail of ranks in processes of their own, which may end: connections that the others outlive.

A collective library gives up as a whole where one process is lost. Here each pair of ranks has a
connection of its own, made with the tokens of :mod:`fxpart.runtime.transport.handshake`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from fxpart.environment import read_launch
from fxpart.errors import error
from fxpart.runtime.heartbeat.rendezvous import own_address
from fxpart.runtime.queues.frames import ExchangeContribution, ExchangeResult, TensorFrame
from fxpart.runtime.queues.peer_connection import PeerConnection
from fxpart.runtime.transport.handshake import (
    LoopbackSockets,
    NetworkSockets,
    SocketKind,
    connect_all_pairs,
)
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.queues.dispatcher import Dispatcher
from fxpart.schedule.queues.messages import (
    DispatcherMessage,
    Event,
    ReplicaLossReport,
    SendOrder,
    StopOrder,
)

Tensors = list[torch.Tensor]
Hear = Callable[[int, TensorFrame | ExchangeContribution | ExchangeResult, Tensors], object]
_CLOSING = 10.0  # seconds


class SocketMessenger:
    """The mail of one copy's process.

    peers: the connections, by rank. serve: takes what is to be sent from here to another copy, at
    once and from any thread, so that nobody waits for it until a computation ends; False leaves it
    to the copy, in its turn.
    """

    def __init__(
        self, inner: Transport, patience: float, hear: Hear, stir: Callable[[], object]
    ) -> None:
        """inner: over which the ranks find each other; every rank makes one. FXP602 if they cannot.

        patience: seconds of silence after which a rank counts as lost. hear: is given what is none
        of the copies' business. stir: called when a connection has ended.
        """
        (self._own,) = inner.local
        self._others, self._stir = hear, stir
        self.serve: Callable[[SendOrder], bool] = lambda said: False
        self._inbox: queue.SimpleQueue[tuple[DispatcherMessage, Tensors]] = queue.SimpleQueue()
        self._ahead: tuple[DispatcherMessage, Tensors] | None = None
        self._closing = False
        self._copies: list[int] = []
        self._dispatcher: Dispatcher | None = None
        self._early: list[tuple[int, Event]] = []
        self._desk = threading.RLock()
        found = connect_all_pairs(self._own, inner.ranks, inner.exchange_bytes, _kind())
        if found is None:
            raise error(
                "FXP602", where="routing=queue", why="the ranks cannot connect to each other",
                fix="see that connections between their machines are allowed",
            )  # fmt: skip
        self.peers = {
            rank: PeerConnection(rank, connection, patience, self._hear, self._leave)
            for rank, connection in found.items()
        }
        for peer in self.peers.values():
            peer.start()

    def start(self, copies: Sequence[int], dispatcher: Dispatcher | None) -> None:
        """copies: the rank of each. dispatcher: on rank 0."""
        with self._desk:
            self._copies, self._dispatcher = list(copies), dispatcher
            early, self._early = self._early, []
            for rank, event in early:
                self._ask(rank, event)
        for rank, peer in self.peers.items():
            if peer.gone:  # before anybody could be told
                self._leave(rank)

    # -- mail -------------------------------------------------------------------------------------

    def post(self, source: int, target: int, said: DispatcherMessage, tensors: Tensors) -> None:
        """To another copy's process, straight."""
        ready = [tensor.detach().cpu().contiguous() for tensor in tensors]
        self.peers[self._copies[target]].send(said, ready)

    def tell(self, copy: int, event: Event) -> None:
        """The dispatcher, here or on rank 0."""
        if self._own == 0:
            self._ask(0, event)
        else:
            self.peers[0].send(event)

    def take(self, copy: int) -> tuple[DispatcherMessage, Tensors] | None:
        """What came next."""
        found, self._ahead = self._ahead, None
        if found is None:
            try:
                return self._inbox.get_nowait()
            except queue.Empty:
                return None
        return found

    def wait(self) -> None:
        """Until something has come; where rank 0 is gone, word of that comes."""
        while self._ahead is None:
            try:
                self._ahead = self._inbox.get(timeout=1.0)  # so that signals are heard
            except queue.Empty:
                continue

    # -- threads of the connections ---------------------------------------------------------------

    def _hear(self, rank: int, said: DispatcherMessage, tensors: Tensors) -> None:
        if isinstance(said, Event):
            with self._desk:
                if self._dispatcher is None:
                    self._early.append((rank, said))
                else:
                    self._ask(rank, said)
        elif isinstance(said, TensorFrame | ExchangeContribution | ExchangeResult):
            self._others(rank, said, tensors)
        else:
            self._bring(said, tensors)

    def _bring(self, said: DispatcherMessage, tensors: Tensors) -> None:
        """To the copy of this process."""
        if not (isinstance(said, SendOrder) and self.serve(said)):
            self._inbox.put((said, tensors))

    def _ask(self, rank: int, event: Event) -> None:
        """What the dispatcher says to an event of a rank, to all whom it concerns."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "it is on rank 0"
        with self._desk:
            try:
                orders = dispatcher.hear(self._copies.index(rank), event)
            except Exception as cause:  # a thread's exception would be heard by nobody
                why = f"{type(cause).__name__}: {cause}"
                dispatcher.stop((("FXP900", "the dispatcher", why, ""),))
                orders = [(copy, StopOrder(dispatcher.problems)) for copy in dispatcher.all()]
            for copy, order in orders:
                target = self._copies[copy]
                if target == self._own:
                    self._bring(order, [])
                else:
                    self.peers[target].send(order)
            for copy in dispatcher.lost if isinstance(event, ReplicaLossReport) else ():
                if not self.peers[self._copies[copy]].gone:
                    self.peers[self._copies[copy]].drop()

    def _leave(self, rank: int) -> None:
        """A connection has ended."""
        self._stir()
        if self._closing:
            return
        if rank == 0:
            what = "has closed its trainer" if self.peers[0].parted else "is gone"
            why = f"rank 0, which says who does what, {what}, or has given this rank up"
            problem = ("FXP514", f"rank {self._own}", why, "start again from the last checkpoint")
            self._inbox.put((StopOrder((problem,)), []))
        elif not self.peers[rank].parted:
            with self._desk:
                if self._copies:
                    self.tell(0, ReplicaLossReport(self._copies.index(rank)))

    def close(self) -> None:
        """End the connections; others go on without this rank."""
        if not self._closing:
            self._closing = True
            limit = time.monotonic() + _CLOSING
            for peer in self.peers.values():
                peer.close(max(limit - time.monotonic(), 0.1))


def _kind() -> SocketKind:
    found = read_launch()
    if found is None or found.one_machine:
        return LoopbackSockets()
    return NetworkSockets(own_address(found))
