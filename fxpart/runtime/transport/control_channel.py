"""Control channel: a loopback TCP connection between each pair of processes on one host.

Ranks compare a few integers twice per step. gloo passes every message to another thread three
times; a plain socket is read by the thread that needs it, with a tenth of the CPU time. Each rank
receives directly from each other rank.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from fxpart.collectives.failures import NO_RANK, waiting
from fxpart.runtime.transport.handshake import (
    LoopbackSockets,
    Spread,
    connect_all_pairs,
    receive_exactly,
)
from fxpart.runtime.transport.interface import PeerLostError, TransferTimeoutError


class ControlChannel:
    """All-gather of rows of integers.

    :meth:`begin` sends a row and :meth:`end` receives all rows, alternately.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout: float) -> None:
        """peers: a connection to every other rank. timeout: maximum seconds of a wait."""
        self.timeout = timeout
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        for peer in peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, row: Sequence[int]) -> bytes:
        """Send a row of 63-bit integers, equally long on all ranks; return a handle for
        :meth:`end`.
        """
        mine = struct.pack(f"<{len(row)}q", *row)
        for rank, peer in self._peers.items():
            try:
                peer.settimeout(self.timeout)
                peer.sendall(mine)
            except TimeoutError as cause:
                raise TransferTimeoutError(self.timeout, f"rank {rank} does not read") from cause
            except OSError as cause:
                raise _make_lost_error(rank, cause) from cause
        return mine

    def end(self, mine: bytes) -> list[list[int]]:
        """Return all rows in order of rank; TransferTimeoutError, PeerLostError."""
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
                raise _make_lost_error(rank, cause) from cause
        waiting.rank = NO_RANK
        form = struct.Struct(f"<{len(mine) // 8}q")
        return [list(form.unpack(rows[rank])) for rank in sorted(rows)]

    def wake(self) -> None:
        """End all current and later waits after a rank was lost; callable from any thread."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.close()


def connect_control_channel(
    rank: int, ranks: int, spread: Spread, timeout: float
) -> ControlChannel | None:
    """Connect all ranks; return None on every rank if any pair cannot connect by loopback.

    spread: see :func:`fxpart.runtime.transport.handshake.connect_all_pairs`.
    """
    peers = connect_all_pairs(rank, ranks, spread, LoopbackSockets())
    return None if peers is None else ControlChannel(rank, peers, timeout)


def _make_lost_error(rank: int, cause: OSError) -> PeerLostError:
    return PeerLostError(f"rank {rank} closed the connection: {cause}")
