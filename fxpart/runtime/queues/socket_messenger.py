"""Messenger between processes whose connections fail independently.

A collective library fails as a whole if one process is lost. Here each pair of ranks has its own
connection, authenticated by the tokens of :mod:`fxpart.runtime.transport.handshake`.
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
    """Messenger of one replica's process.

    peers: connections by rank. serve: sends a stored value to another replica at once, from any
    thread, so that no replica waits for a computation to end; False leaves it to the replica's own
    loop.
    """

    def __init__(
        self,
        inner: Transport,
        patience: float,
        on_other_message: Hear,
        on_end: Callable[[], object],
    ) -> None:
        """Connect to all other ranks; every rank creates one. FXP602 if they cannot connect.

        inner: transport for the rendezvous. patience: seconds of silence after which a rank counts
        as lost. on_other_message: receives messages that are not for the replica. on_end: called
        when a connection has ended.
        """
        (self._own,) = inner.local
        self._on_other_message, self._on_end = on_other_message, on_end
        self.serve: Callable[[SendOrder], bool] = lambda message: False
        self._inbox: queue.SimpleQueue[tuple[DispatcherMessage, Tensors]] = queue.SimpleQueue()
        self._next_message: tuple[DispatcherMessage, Tensors] | None = None
        self._closing = False
        self._ranks_of_replicas: list[int] = []
        self._dispatcher: Dispatcher | None = None
        self._early_events: list[tuple[int, Event]] = []
        self._lock = threading.RLock()
        found = connect_all_pairs(self._own, inner.ranks, inner.exchange_bytes, _kind())
        if found is None:
            raise error(
                "FXP602", where="routing=queue", why="the ranks cannot connect to each other",
                fix="allow TCP connections between their hosts",
            )  # fmt: skip
        self.peers = {
            rank: PeerConnection(rank, connection, patience, self._receive, self._handle_end)
            for rank, connection in found.items()
        }
        for peer in self.peers.values():
            peer.start()

    def start(self, copies: Sequence[int], dispatcher: Dispatcher | None) -> None:
        """Start delivery. copies: rank of each replica. dispatcher: on rank 0, else None."""
        with self._lock:
            self._ranks_of_replicas, self._dispatcher = list(copies), dispatcher
            events, self._early_events = self._early_events, []
            for rank, event in events:
                self._dispatch(rank, event)
        for rank, peer in self.peers.items():
            if peer.gone:  # it ended before the dispatcher existed
                self._handle_end(rank)

    # -- messages ---------------------------------------------------------------------------------

    def post(self, source: int, target: int, message: DispatcherMessage, tensors: Tensors) -> None:
        """Send directly to the process of another replica."""
        ready = [tensor.detach().cpu().contiguous() for tensor in tensors]
        self.peers[self._ranks_of_replicas[target]].send(message, ready)

    def tell(self, copy: int, event: Event) -> None:
        """Send to the dispatcher, here or on rank 0."""
        if self._own == 0:
            self._dispatch(0, event)
        else:
            self.peers[0].send(event)

    def take(self, copy: int) -> tuple[DispatcherMessage, Tensors] | None:
        """Return the next message, or None."""
        found, self._next_message = self._next_message, None
        if found is None:
            try:
                return self._inbox.get_nowait()
            except queue.Empty:
                return None
        return found

    def wait(self) -> None:
        """Wait for a message; the loss of rank 0 arrives as one."""
        while self._next_message is None:
            try:
                self._next_message = self._inbox.get(
                    timeout=1.0
                )  # a timeout, so that signals are handled
            except queue.Empty:
                continue

    # -- threads of the connections ---------------------------------------------------------------

    def _receive(self, rank: int, message: DispatcherMessage, tensors: Tensors) -> None:
        if isinstance(message, Event):
            with self._lock:
                if self._dispatcher is None:
                    self._early_events.append((rank, message))
                else:
                    self._dispatch(rank, message)
        elif isinstance(message, TensorFrame | ExchangeContribution | ExchangeResult):
            self._on_other_message(rank, message, tensors)
        else:
            self._deliver(message, tensors)

    def _deliver(self, message: DispatcherMessage, tensors: Tensors) -> None:
        """Deliver to the replica of this process."""
        if not (isinstance(message, SendOrder) and self.serve(message)):
            self._inbox.put((message, tensors))

    def _dispatch(self, rank: int, event: Event) -> None:
        """Pass an event of a rank to the dispatcher and send its orders."""
        dispatcher = self._dispatcher
        assert dispatcher is not None, "it is on rank 0"
        with self._lock:
            try:
                orders = dispatcher.handle(self._ranks_of_replicas.index(rank), event)
            except Exception as cause:  # An exception of this thread would not be reported.
                why = f"{type(cause).__name__}: {cause}"
                dispatcher.stop((("FXP900", "the dispatcher", why, ""),))
                orders = [(copy, StopOrder(dispatcher.problems)) for copy in dispatcher.all()]
            for copy, order in orders:
                target = self._ranks_of_replicas[copy]
                if target == self._own:
                    self._deliver(order, [])
                else:
                    self.peers[target].send(order)
            for copy in dispatcher.lost if isinstance(event, ReplicaLossReport) else ():
                if not self.peers[self._ranks_of_replicas[copy]].gone:
                    self.peers[self._ranks_of_replicas[copy]].drop()

    def _handle_end(self, rank: int) -> None:
        """Handle the end of a connection."""
        self._on_end()
        if self._closing:
            return
        if rank == 0:
            what = "has closed its trainer" if self.peers[0].parted else "has ended"
            why = f"rank 0, which runs the dispatcher, {what} or has dropped this rank"
            problem = ("FXP514", f"rank {self._own}", why, "restart from the last checkpoint")
            self._inbox.put((StopOrder((problem,)), []))
        elif not self.peers[rank].parted:
            with self._lock:
                if self._ranks_of_replicas:
                    self.tell(0, ReplicaLossReport(self._ranks_of_replicas.index(rank)))

    def close(self) -> None:
        """Close the connections; the other ranks continue without this one."""
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
