"""A transport between the ranks that live, for what looks at the whole model.

Exchanges go through rank 0, which waits only for ranks that live.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from fxpart.runtime.queues.frames import ExchangeContribution, ExchangeResult, TensorFrame
from fxpart.runtime.queues.socket_messenger import SocketMessenger, Tensors
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError, Transport

_SPREAD, _SUM = 101, 102  # channels of broadcast and total
_Box = tuple[int, int]  # rank, channel
_Handle = tuple[_Box, int, torch.device]


class FaultTolerantTransport:
    """A :class:`Transport` over connections that each end for themselves.

    ranks, local: of those that are known by all to live, who are numbered anew by :meth:`shrink`.
    wire: the copies' mail over the same connections.
    """

    def __init__(self, inner: Transport, patience: float) -> None:
        """See :class:`~fxpart.runtime.queues.socket_messenger.SocketMessenger`."""
        (self._own,) = inner.local
        self.ranks, self.local, self.timeout = inner.ranks, inner.local, inner.timeout
        self._inner = inner
        self._real = list(range(inner.ranks))
        self._here = threading.Condition()
        self._arrived: defaultdict[_Box, deque[torch.Tensor]] = defaultdict(deque)
        self._done: dict[tuple[_Box, int], torch.Tensor] = {}
        self._posted: defaultdict[_Box, int] = defaultdict(int)
        self._taken: defaultdict[_Box, int] = defaultdict(int)
        self._words: dict[int, dict[int, bytes]] = {}
        self._told: dict[int, tuple[bytes, ...]] = {}
        self._exchanges = 0
        self.wire = SocketMessenger(inner, patience, self._hear, self._stir)

    def _hear(
        self, rank: int, said: TensorFrame | ExchangeContribution | ExchangeResult, tensors: Tensors
    ) -> None:
        with self._here:
            if isinstance(said, TensorFrame):
                self._arrived[rank, said.channel].append(tensors[0])
            elif isinstance(said, ExchangeContribution):
                self._words.setdefault(said.number, {})[rank] = said.text
            else:
                self._told[said.number] = said.texts
            self._here.notify_all()

    def _stir(self) -> None:
        with self._here:
            self._here.notify_all()

    def shrink(self, lost: Sequence[int]) -> dict[int, int]:
        """Number those that live anew, from 0; by old number the new one.

        lost: the ranks that are gone, by the numbers that they had at first; every rank calls it
        with the same, where no message is under way.
        """
        self._real = [rank for rank in range(self._inner.ranks) if rank not in lost]
        renamed = {rank: number for number, rank in enumerate(self._real)}
        self.ranks, self.local = len(self._real), (renamed[self._own],)
        return renamed

    def missed(self) -> Callable[[], set[int]]:
        """What tells which of the ranks that live now, by their numbers of now, are gone since."""
        peers = [self.wire.peers.get(rank) for rank in self._real]
        return lambda: {n for n, peer in enumerate(peers) if peer is not None and peer.gone}

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> None:
        """Start sending."""
        self.wire.peers[self._real[target]].send(
            TensorFrame(channel), [tensor.detach().cpu().contiguous()]
        )

    def send_all(
        self, source: int, target: int, channel: int, tensors: Sequence[torch.Tensor]
    ) -> list[None]:
        """Several, in order."""
        for tensor in tensors:
            self.send(source, target, channel, tensor)
        return [None] * len(tensors)

    def post(
        self,
        source: int,
        target: int,
        channel: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Handle:
        """The place of the channel's next tensor."""
        return self._post(source, channel, device)

    def _post(self, source: int, channel: int, device: torch.device) -> _Handle:
        box = self._real[source], channel
        self._posted[box] += 1
        return box, self._posted[box] - 1, device

    def ready(self, handle: Any) -> bool:
        """Others run by themselves."""
        return True

    def wait(self, handle: _Handle | None) -> torch.Tensor:
        """The tensor, of a receive; TransferTimeoutError, PeerLostError."""
        if handle is None:  # of a send
            return torch.empty(0)
        box, place, device = handle
        with self._here:
            while (box, place) not in self._done:
                while self._arrived[box]:
                    self._done[box, self._taken[box]] = self._arrived[box].popleft()
                    self._taken[box] += 1
                if (box, place) not in self._done:
                    self._until(lambda: bool(self._arrived[box]), [box[0]])
            return self._done.pop((box, place)).to(device)

    def begin_exchange(self, row: Sequence[int]) -> Any:
        """Give a few numbers."""
        return self._say(msgspec.msgpack.encode([int(number) for number in row]))

    def end_exchange(self, handle: Any) -> list[list[int]]:
        """Those of every rank that lives."""
        return [msgspec.msgpack.decode(each, type=list[int]) for each in self._heard(handle)]

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Both at once."""
        return self.end_exchange(self.begin_exchange(row))

    def exchange_bytes(self, message: bytes) -> list[bytes]:
        """The messages of all ranks that live."""
        return self._heard(self._say(message))

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill ``tensor`` with that of a rank."""
        if self.local[0] == root:
            for rank in range(self.ranks):
                if rank != root:
                    self.send(root, rank, _SPREAD, tensor)
            return tensor
        found = self.wait(self._post(root, _SPREAD, tensor.device))
        return tensor.copy_(found.view(tensor.shape))

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all, in the order of the ranks."""
        if self.local[0] != 0:
            self.send(self.local[0], 0, _SUM, tensor)
        else:
            for rank in range(1, self.ranks):
                tensor += self.wait(self._post(rank, _SUM, tensor.device))
        return self.broadcast(tensor, 0)

    def close(self) -> None:
        """End the connections; others go on without this rank."""
        self.wire.close()
        self._inner.close()

    # -- exchanges through rank 0 -----------------------------------------------------------------

    def _say(self, text: bytes) -> int:
        number, self._exchanges = self._exchanges, self._exchanges + 1
        if self._own == 0:
            with self._here:
                self._words.setdefault(number, {})[0] = text
        else:
            self.wire.peers[0].send(ExchangeContribution(number, text))
        return number

    def _heard(self, number: int) -> list[bytes]:
        with self._here:
            if self._own != 0:
                self._until(lambda: number in self._told, [0])
                return list(self._told.pop(number))
            words = self._words[number]
            self._until(lambda: all(rank in words for rank in self._others()), [])
            texts = tuple(words[rank] for rank in sorted(words))
            del self._words[number]
        for rank in self._others():
            self.wire.peers[rank].send(ExchangeResult(number, texts))
        return list(texts)

    def _others(self) -> list[int]:
        """Ranks that are not known to be gone."""
        return [rank for rank, peer in self.wire.peers.items() if not peer.gone]

    def _until(self, done: Callable[[], bool], needed: Sequence[int]) -> None:
        """Wait, holding the condition. needed: ranks without which it will not be."""
        limit = time.monotonic() + self.timeout
        while not done():
            for rank in needed:
                if self.wire.peers[rank].gone:
                    raise PeerLostError(f"rank {rank} is gone")
            if time.monotonic() > limit:
                raise TransferTimeoutError(self.timeout)
            self._here.wait(1.0)
