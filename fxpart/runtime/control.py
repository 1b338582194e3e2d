"""Small messages between the processes of one machine: a loopback connection for each pair.

Ranks compare a few integers twice in a step. gloo hands every message to a thread of its own,
three times for each; a plain socket is read by the thread that needs it, for a tenth of the CPU
time. Each rank hears each other one directly, so none waits for a third to pass it on.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from fxpart.runtime.transport import PeerLostError, TransferTimeoutError

_TOKEN = 32
_HELLO = struct.Struct(f"<{_TOKEN}sI")
_HANDSHAKE_SECONDS = 20.0
Spread = Callable[[bytes], list[bytes]]


class Control:
    """Everybody's row of integers to everybody.

    A row is given with :meth:`begin` and all rows are read with :meth:`end`, in turn.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout: float) -> None:
        """peers: a connection to every other rank. timeout: seconds that a wait may take."""
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        self._timeout = timeout
        for peer in peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, row: Sequence[int]) -> bytes:
        """Give a row of 63-bit integers, as long as everybody's; the handle is for :meth:`end`."""
        mine = struct.pack(f"<{len(row)}q", *row)
        for rank, peer in self._peers.items():
            try:
                peer.settimeout(self._timeout)
                peer.sendall(mine)
            except TimeoutError as cause:
                raise TransferTimeoutError(self._timeout, f"rank {rank} reads nothing") from cause
            except OSError as cause:
                raise _lost(rank, cause) from cause
        return mine

    def end(self, mine: bytes) -> list[list[int]]:
        """All rows in order of rank; TransferTimeoutError, PeerLostError."""
        limit = time.monotonic() + self._timeout
        rows = {self._rank: mine}
        for rank, peer in self._peers.items():
            try:
                rows[rank] = _exactly(peer, len(mine), limit)
            except TimeoutError as cause:
                raise TransferTimeoutError(self._timeout, f"nothing from rank {rank}") from cause
            except OSError as cause:
                raise _lost(rank, cause) from cause
        form = struct.Struct(f"<{len(mine) // 8}q")
        return [list(form.unpack(rows[rank])) for rank in sorted(rows)]

    def close(self) -> None:
        """End the connections."""
        for peer in self._peers.values():
            peer.close()


def join(rank: int, ranks: int, spread: Spread, timeout: float) -> Control | None:
    """Connections between all ranks, or None on every rank if any two cannot meet by loopback.

    spread: gives a message to all processes and returns everybody's, in order of rank. It carries
    ports and random tokens; only who knows a rank's token is let in by it.
    """
    token = secrets.token_bytes(_TOKEN)
    listener: socket.socket | None = None
    try:
        listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
        offer = token + struct.pack("<H", listener.getsockname()[1])
    except OSError:
        offer = b""
    offers = spread(offer)
    peers: dict[int, socket.socket] = {}
    limit = time.monotonic() + _HANDSHAKE_SECONDS
    try:
        if listener is not None and all(offers):
            for other in range(rank):
                peers[other] = _call(rank, offers[other], limit)
            _admit(listener, range(rank + 1, ranks), token, peers, limit)
    except OSError:
        pass  # told to all by what was reached, below
    finally:
        if listener is not None:
            listener.close()
    if all(spread(b"\1" if len(peers) == ranks - 1 else b"")):
        return Control(rank, peers, timeout)
    for peer in peers.values():
        peer.close()
    return None


def _call(rank: int, offer: bytes, limit: float) -> socket.socket:
    """Connect to a rank, show its token, and see that the other end knows it, too."""
    token, (port,) = offer[:_TOKEN], struct.unpack("<H", offer[_TOKEN:])
    peer = socket.create_connection(("127.0.0.1", port), _HANDSHAKE_SECONDS)
    try:
        peer.sendall(_HELLO.pack(_proof(token, b"call"), rank))
        if not hmac.compare_digest(_exactly(peer, _TOKEN, limit), _proof(token, b"answer")):
            raise ConnectionError("another process")
    except OSError:
        peer.close()
        raise
    return peer


def _admit(
    listener: socket.socket,
    expected: Sequence[int],
    token: bytes,
    peers: dict[int, socket.socket],
    limit: float,
) -> None:
    """Accept the expected ranks, each once; strangers are turned away."""
    while not all(rank in peers for rank in expected):
        listener.settimeout(_left(limit))
        peer, _ = listener.accept()
        try:
            proof, rank = _HELLO.unpack(_exactly(peer, _HELLO.size, limit))
            known = hmac.compare_digest(proof, _proof(token, b"call"))
            if not known or rank in peers or rank not in expected:
                raise ConnectionError("a stranger")
            peer.sendall(_proof(token, b"answer"))
            peers[rank] = peer
        except OSError:
            peer.close()


def _proof(token: bytes, what: bytes) -> bytes:
    return hmac.digest(token, what, "sha256")


def _left(limit: float) -> float:
    return max(limit - time.monotonic(), 1e-3)


def _exactly(peer: socket.socket, count: int, limit: float) -> bytes:
    """That many bytes; TimeoutError, ConnectionError."""
    found = b""
    while len(found) < count:
        peer.settimeout(_left(limit))
        part = peer.recv(count - len(found))
        if not part:
            raise ConnectionError("the other end has closed")
        found += part
    return found


def _lost(rank: int, cause: OSError) -> PeerLostError:
    return PeerLostError(f"rank {rank} closed the connection: {cause}")
