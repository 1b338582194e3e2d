"""Small messages between processes of one machine: a star of loopback connections around rank 0.

Ranks compare a few integers twice in a step. gloo hands every message to its own thread, three
times for each; a plain socket is read by the thread that needs it, for a tenth of the CPU time.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence

from fxpart.runtime.transport import PeerLostError, TransferTimeoutError

_TOKEN = 32
_HELLO = struct.Struct(f"<{_TOKEN}sI")
_HANDSHAKE_SECONDS = 20.0
Spread = Callable[[bytes], list[bytes]]


class Control:
    """Everybody's row of integers to everybody, through rank 0.

    A row is given with :meth:`begin` and all rows are read with :meth:`end`, in turn.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout: float) -> None:
        """peers: on rank 0 a connection to every other rank, elsewhere one to rank 0."""
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        self._timeout = timeout
        for peer in peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, row: Sequence[int]) -> bytes:
        """Give a row of 63-bit integers, as long as everybody's; the handle is for :meth:`end`."""
        mine = struct.pack(f"<{len(row)}q", *row)
        if self._rank:
            self._send(0, mine)
        return mine

    def end(self, mine: bytes) -> list[list[int]]:
        """All rows in order of rank; TransferTimeoutError, PeerLostError."""
        limit = time.monotonic() + self._timeout
        if self._rank:
            table = self._receive(0, self._receive_count(limit) * len(mine), limit)
        else:
            table = mine + b"".join(self._receive(p, len(mine), limit) for p in self._peers)
            reply = struct.pack("<I", len(self._peers) + 1) + table
            for peer in self._peers:
                self._send(peer, reply)
        size = len(mine)
        return [
            list(struct.unpack(f"<{size // 8}q", table[at : at + size]))
            for at in range(0, len(table), size)
        ]

    def close(self) -> None:
        """End the connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _receive_count(self, limit: float) -> int:
        count: int = struct.unpack("<I", self._receive(0, 4, limit))[0]
        return count

    def _send(self, peer: int, message: bytes) -> None:
        try:
            self._peers[peer].settimeout(self._timeout)
            self._peers[peer].sendall(message)
        except TimeoutError as cause:
            raise TransferTimeoutError(self._timeout, f"no room to send to rank {peer}") from cause
        except (OSError, KeyError) as cause:
            raise PeerLostError(f"rank {peer} closed the connection: {cause}") from cause

    def _receive(self, peer: int, count: int, limit: float) -> bytes:
        parts: list[bytes] = []
        try:
            while count:
                self._peers[peer].settimeout(max(limit - time.monotonic(), 1e-3))
                part = self._peers[peer].recv(count)
                if not part:
                    raise PeerLostError(f"rank {peer} closed the connection")
                parts.append(part)
                count -= len(part)
        except TimeoutError as cause:
            raise TransferTimeoutError(self._timeout, f"nothing from rank {peer}") from cause
        except (OSError, KeyError) as cause:
            raise PeerLostError(f"rank {peer} closed the connection: {cause}") from cause
        return b"".join(parts)


def join(rank: int, ranks: int, spread: Spread, timeout: float) -> Control | None:
    """The star of all ranks, or None on every rank if any of them cannot reach rank 0 by loopback.

    spread: gives a message to all processes and returns everybody's, in order of rank. It carries
    rank 0's port and a random token; only who knows the token is let in.
    """
    listener: socket.socket | None = None
    offer = b""
    if rank == 0:
        listener, offer = _listen(ranks)
    offer = spread(offer)[0]
    peers: dict[int, socket.socket] = {}
    try:
        if offer and rank:
            peers = {0: _call(rank, offer)}
        elif listener is not None:
            peers = _admit(listener, ranks, offer[:_TOKEN])
    except OSError:
        peers = {}
    finally:
        if listener is not None:
            listener.close()
    wanted = ranks - 1 if rank == 0 else 1
    if all(spread(b"\1" if len(peers) == wanted else b"")):
        return Control(rank, peers, timeout)
    for peer in peers.values():
        peer.close()
    return None


def _listen(ranks: int) -> tuple[socket.socket | None, bytes]:
    """A listener on a free loopback port, and the offer: a token and the port."""
    try:
        listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    except OSError:
        return None, b""
    return listener, secrets.token_bytes(_TOKEN) + struct.pack("<H", listener.getsockname()[1])


def _call(rank: int, offer: bytes) -> socket.socket:
    """Connect to rank 0, show the token, and see that the other end knows it, too."""
    token, (port,) = offer[:_TOKEN], struct.unpack("<H", offer[_TOKEN:])
    peer = socket.create_connection(("127.0.0.1", port), _HANDSHAKE_SECONDS)
    try:
        peer.sendall(_HELLO.pack(_proof(token, b"call"), rank))
        if not hmac.compare_digest(_exactly(peer, _TOKEN), _proof(token, b"answer")):
            raise ConnectionError("not rank 0")
    except OSError:
        peer.close()
        raise
    return peer


def _admit(listener: socket.socket, ranks: int, token: bytes) -> dict[int, socket.socket]:
    """Accept the other ranks, each once; strangers are turned away."""
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + _HANDSHAKE_SECONDS
    while len(peers) < ranks - 1:
        listener.settimeout(max(end - time.monotonic(), 1e-3))
        peer, _ = listener.accept()
        try:
            peer.settimeout(max(end - time.monotonic(), 1e-3))
            proof, rank = _HELLO.unpack(_exactly(peer, _HELLO.size))
            known = hmac.compare_digest(proof, _proof(token, b"call"))
            if not known or rank in peers or not 0 < rank < ranks:
                raise ConnectionError("a stranger")
            peer.sendall(_proof(token, b"answer"))
            peers[rank] = peer
        except OSError:
            peer.close()
    return peers


def _proof(token: bytes, what: bytes) -> bytes:
    return hmac.digest(token, what, "sha256")


def _exactly(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = peer.recv(count - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found
