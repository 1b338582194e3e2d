"""Transport between the ranks that are alive, for calls that use the whole model.

Exchanges go through rank 0, which waits only for ranks that are alive.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

from fxpart.runtime.queues.frames import ExchangeContribution, ExchangeResult, TensorFrame
from fxpart.runtime.queues.socket_messenger import SocketMessenger, Tensors
from fxpart.runtime.transport.interface import (
    AHEAD,
    PeerLostError,
    Route,
    TransferTimeoutError,
    Transport,
)

_SPREAD, _SUM = 101, 102  # channels of broadcast and total
_Box = tuple[int, int]  # rank, channel
_Handle = tuple[_Box, int, torch.device]


class FaultTolerantTransport(Transport):
    """A :class:`Transport` whose connections fail independently.

    ranks, local: of the ranks that all know to be alive, renumbered by :meth:`shrink`. wire: the
    messenger of the replicas, on the same connections.
    """

    def __init__(self, inner: Transport, patience: float) -> None:
        """Create a transport; see
        :class:`~fxpart.runtime.queues.socket_messenger.SocketMessenger`.
        """
        (self._own_rank,) = inner.local
        self.ranks, self.local, self.timeout = inner.ranks, inner.local, inner.timeout
        self.receives_ahead = AHEAD
        self._inner = inner
        self._original_ranks = list(range(inner.ranks))
        self._condition = threading.Condition()
        self._arrived: defaultdict[_Box, deque[torch.Tensor]] = defaultdict(deque)
        self._done: dict[tuple[_Box, int], torch.Tensor] = {}
        self._posted: defaultdict[_Box, int] = defaultdict(int)
        self._taken: defaultdict[_Box, int] = defaultdict(int)
        self._contributions: dict[int, dict[int, bytes]] = {}
        self._results: dict[int, tuple[bytes, ...]] = {}
        self._exchanges = 0
        self.wire = SocketMessenger(inner, patience, self._receive, self._wake_waiters)

    def _receive(
        self,
        rank: int,
        message: TensorFrame | ExchangeContribution | ExchangeResult,
        tensors: Tensors,
    ) -> None:
        with self._condition:
            if isinstance(message, TensorFrame):
                self._arrived[rank, message.channel].append(tensors[0])
            elif isinstance(message, ExchangeContribution):
                self._contributions.setdefault(message.number, {})[rank] = message.text
            else:
                self._results[message.number] = message.texts
            self._condition.notify_all()

    def _wake_waiters(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def shrink(self, lost: Sequence[int]) -> dict[int, int]:
        """Renumber the living ranks from 0; return the new number of each old one.

        lost: lost ranks by their original numbers. Every rank calls it with the same ranks while no
        message is in transit.
        """
        self._original_ranks = [rank for rank in range(self._inner.ranks) if rank not in lost]
        new_ranks = {rank: number for number, rank in enumerate(self._original_ranks)}
        self.ranks, self.local = len(self._original_ranks), (new_ranks[self._own_rank],)
        return new_ranks

    def watch_lost_ranks(self) -> Callable[[], set[int]]:
        """Return a function that returns the currently numbered ranks that have been lost since."""
        peers = [self.wire.peers.get(rank) for rank in self._original_ranks]
        return lambda: {n for n, peer in enumerate(peers) if peer is not None and peer.gone}

    def open(self, routes: Iterable[Route], device: torch.device) -> None:
        """Do nothing: tensors are sent over sockets."""

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> None:
        """Start a send."""
        self.wire.peers[self._original_ranks[target]].send(
            TensorFrame(channel), [tensor.detach().cpu().contiguous()]
        )

    def post(
        self,
        source: int,
        target: int,
        channel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Handle:
        """Return a handle of the next tensor of a channel."""
        return self._post(source, channel, device)

    def _post(self, source: int, channel: int, device: torch.device) -> _Handle:
        source_channel = self._original_ranks[source], channel
        self._posted[source_channel] += 1
        return source_channel, self._posted[source_channel] - 1, device

    def ready(self, handle: Any) -> bool:
        """Return True: receives complete in other threads."""
        return True

    def wait(self, handle: _Handle | None) -> torch.Tensor:
        """Wait for the tensor of a receive; TransferTimeoutError or PeerLostError if it fails."""
        if handle is None:  # handle of a send
            return torch.empty(0)
        source_channel, place, device = handle
        with self._condition:
            while (source_channel, place) not in self._done:
                while self._arrived[source_channel]:
                    self._done[source_channel, self._taken[source_channel]] = self._arrived[
                        source_channel
                    ].popleft()
                    self._taken[source_channel] += 1
                if (source_channel, place) not in self._done:
                    self._wait_until(
                        lambda: bool(self._arrived[source_channel]), [source_channel[0]]
                    )
            return self._done.pop((source_channel, place)).to(device)

    def begin_exchange(self, row: Sequence[int]) -> Any:
        """Start an exchange of integers."""
        return self._contribute(msgspec.msgpack.encode([int(number) for number in row]))

    def end_exchange(self, handle: Any) -> list[list[int]]:
        """Return the integers of every living rank."""
        return [
            msgspec.msgpack.decode(each, type=list[int]) for each in self._wait_for_result(handle)
        ]

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """Exchange messages with every living rank."""
        return self._wait_for_result(self._contribute(message))

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill ``tensor`` with that of the root rank."""
        if self.local[0] == root:
            for rank in range(self.ranks):
                if rank != root:
                    self.send(root, rank, _SPREAD, tensor)
            return tensor
        found = self.wait(self._post(root, _SPREAD, tensor.device))
        return tensor.copy_(found.view(tensor.shape))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in rank order."""
        if self.local[0] != 0:
            self.send(self.local[0], 0, _SUM, tensor)
        else:
            for rank in range(1, self.ranks):
                tensor += self.wait(self._post(rank, _SUM, tensor.device))
        return self.broadcast(tensor, 0)

    def close(self) -> None:
        """Close the connections; the other ranks continue without this one."""
        self.wire.close()
        self._inner.close()

    # -- exchanges through rank 0 -----------------------------------------------------------------

    def _contribute(self, text: bytes) -> int:
        number, self._exchanges = self._exchanges, self._exchanges + 1
        if self._own_rank == 0:
            with self._condition:
                self._contributions.setdefault(number, {})[0] = text
        else:
            self.wire.peers[0].send(ExchangeContribution(number, text))
        return number

    def _wait_for_result(self, number: int) -> list[bytes]:
        with self._condition:
            if self._own_rank != 0:
                self._wait_until(lambda: number in self._results, [0])
                return list(self._results.pop(number))
            contributions = self._contributions[number]
            self._wait_until(
                lambda: all(rank in contributions for rank in self._living_ranks()), []
            )
            texts = tuple(contributions[rank] for rank in sorted(contributions))
            del self._contributions[number]
        for rank in self._living_ranks():
            self.wire.peers[rank].send(ExchangeResult(number, texts))
        return list(texts)

    def _living_ranks(self) -> list[int]:
        """Return the ranks that are not known to be lost."""
        return [rank for rank, peer in self.wire.peers.items() if not peer.gone]

    def _wait_until(self, done: Callable[[], bool], needed: Sequence[int]) -> None:
        """Wait, owning the lock, until done. needed: ranks whose loss is an error."""
        limit = time.monotonic() + self.timeout
        while not done():
            for rank in needed:
                if self.wire.peers[rank].gone:
                    raise PeerLostError(f"rank {rank} has ended")
            if time.monotonic() > limit:
                raise TransferTimeoutError(self.timeout)
            self._condition.wait(1.0)
