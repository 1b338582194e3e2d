"""Small messages between the processes of one machine: a loopback connection for each pair.

Ranks compare a few integers twice in a step. gloo hands every message to a thread of its own,
three times for each; a plain socket is read by the thread that needs it, for a tenth of the CPU
time. Each rank hears each other one directly, so none waits for a third to pass it on.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from fxpart.collectives.failures import NOBODY, waiting
from fxpart.runtime.transport.handshake import (
    LoopbackSockets,
    Spread,
    connect_all_pairs,
    receive_exactly,
)
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError


class ControlChannel:
    """Everybody's row of integers to everybody.

    A row is given with :meth:`begin` and all rows are read with :meth:`end`, in turn.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout: float) -> None:
        """peers: a connection to every other rank. timeout: seconds that a wait may take."""
        self.timeout = timeout
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        for peer in peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, row: Sequence[int]) -> bytes:
        """Give a row of 63-bit integers, as long as everybody's; the handle is for :meth:`end`."""
        mine = struct.pack(f"<{len(row)}q", *row)
        for rank, peer in self._peers.items():
            try:
                peer.settimeout(self.timeout)
                peer.sendall(mine)
            except TimeoutError as cause:
                raise TransferTimeoutError(self.timeout, f"rank {rank} reads nothing") from cause
            except OSError as cause:
                raise _lost(rank, cause) from cause
        return mine

    def end(self, mine: bytes) -> list[list[int]]:
        """All rows in order of rank; TransferTimeoutError, PeerLostError."""
        now = time.monotonic()
        limit = now + self.timeout
        rows = {self._rank: mine}
        waiting.since = now
        for rank, peer in self._peers.items():
            waiting.rank = rank
            try:
                rows[rank] = receive_exactly(peer, len(mine), limit)
            except TimeoutError as cause:
                raise TransferTimeoutError(self.timeout, f"nothing from rank {rank}") from cause
            except OSError as cause:
                raise _lost(rank, cause) from cause
        waiting.rank = NOBODY
        form = struct.Struct(f"<{len(mine) // 8}q")
        return [list(form.unpack(rows[rank])) for rank in sorted(rows)]

    def wake(self) -> None:
        """End all waits, now and later, from another thread: a rank was lost."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connections."""
        for peer in self._peers.values():
            peer.close()


def connect_control_channel(
    rank: int, ranks: int, spread: Spread, timeout: float
) -> ControlChannel | None:
    """Connections between all ranks, or None on every rank if any two cannot meet by loopback.

    spread: see :func:`fxpart.runtime.transport.handshake.connect_all_pairs`.
    """
    peers = connect_all_pairs(rank, ranks, spread, LoopbackSockets())
    return None if peers is None else ControlChannel(rank, peers, timeout)


def _lost(rank: int, cause: OSError) -> PeerLostError:
    return PeerLostError(f"rank {rank} closed the connection: {cause}")
