"""How processes connect to each other: a socket for each pair, known by a token.

The default process group carries everybody's address and a random token; only who knows a rank's
token is let in by it, and shows so in both directions.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

_TOKEN = 32
_HELLO = struct.Struct(f"<{_TOKEN}sI")
_SECONDS = 20.0
Spread = Callable[[bytes], list[bytes]]


class SocketKind(Protocol):
    """A kind of sockets."""

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """A listening socket and its address; OSError where there is none of the kind."""

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """A connection to an address; OSError."""


class LoopbackSockets:
    """TCP over the loopback interface."""

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """Any free port."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        return listener, struct.pack("<H", listener.getsockname()[1])

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Connects to the port."""
        (port,) = struct.unpack("<H", address)
        return socket.create_connection(("127.0.0.1", port), seconds)


class NetworkSockets:
    """TCP between machines, over the interface that an address belongs to."""

    def __init__(self, address: str) -> None:
        """address: of this machine, as the others reach it."""
        self._address = address

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """Any free port of that interface alone."""
        listener = socket.create_server((self._address, 0), backlog=backlog)
        return listener, f"{listener.getsockname()[1]} {self._address}".encode()

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Connects to the other machine's address and port."""
        port, _, host = address.decode().partition(" ")
        return socket.create_connection((host, int(port)), seconds)


class AbstractUnixSockets:
    """Unix sockets by a random name that is in no file system, and gone with its listener (Linux).

    What they can do beside carrying bytes: hand over an open file.
    """

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """A name that nobody can guess."""
        listener = _unix()
        try:
            name = b"fxpart-" + secrets.token_hex(16).encode()
            listener.bind(b"\0" + name)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
        return listener, name

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Waits for the listener at most so long."""
        made = _unix()
        try:
            made.settimeout(seconds)
            made.connect(b"\0" + address)
        except OSError:
            made.close()
            raise
        return made


def connect_all_pairs(
    rank: int, ranks: int, spread: Spread, kind: SocketKind, others: Sequence[int] | None = None
) -> dict[int, socket.socket] | None:
    """A connection to every other rank, or None on every rank if any two cannot meet.

    spread: gives a message to all processes and returns everybody's, in order of rank. Called at
    the same time by all ranks. others: the ranks to connect to, if not all; of any two both or
    none have each other there.
    """
    wanted = [other for other in range(ranks) if other != rank] if others is None else others
    listener: socket.socket | None = None
    token = mine = b""
    try:
        listener, token, mine = open_listener(kind, ranks)
    except OSError:
        pass
    offers = spread(mine)
    peers: dict[int, socket.socket] = {}
    limit = time.monotonic() + _SECONDS
    try:
        if listener is not None and all(offers):
            for other in (other for other in wanted if other < rank):
                peers[other] = connect_to_rank(kind, rank, offers[other], limit)
            accept_ranks(listener, [other for other in wanted if other > rank], token, peers, limit)
    except OSError:
        pass  # told to all by what was reached, below
    finally:
        if listener is not None:
            listener.close()
    if all(spread(b"\1" if len(peers) == len(wanted) else b"")):
        return dict(sorted(peers.items()))
    for peer in peers.values():
        peer.close()
    return None


def receive_exactly(peer: socket.socket, count: int, limit: float) -> bytes:
    """That many bytes until that moment of the monotonic clock; TimeoutError, ConnectionError."""
    found = b""
    while len(found) < count:
        peer.settimeout(_left(limit))
        part = peer.recv(count - len(found))
        if not part:
            raise ConnectionError("the other end has closed")
        found += part
    return found


def open_listener(kind: SocketKind, backlog: int) -> tuple[socket.socket, bytes, bytes]:
    """A listening socket, the token that opens it, and what others need to :func:`connect_to_rank`
    it.
    """
    token = secrets.token_bytes(_TOKEN)
    listener, address = kind.listen(backlog)
    return listener, token, token + address


def connect_to_rank(kind: SocketKind, rank: int, offer: bytes, limit: float) -> socket.socket:
    """Connect to a rank, show its token, and see that the other end knows it, too."""
    token = offer[:_TOKEN]
    peer = kind.call(offer[_TOKEN:], _SECONDS)
    try:
        peer.sendall(_HELLO.pack(_proof(token, b"call"), rank))
        if not hmac.compare_digest(receive_exactly(peer, _TOKEN, limit), _proof(token, b"answer")):
            raise ConnectionError("another process")
    except OSError:
        peer.close()
        raise
    return peer


def accept_ranks(
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
            proof, rank = _HELLO.unpack(receive_exactly(peer, _HELLO.size, limit))
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


def _unix() -> socket.socket:
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise OSError("no Unix sockets")
    return socket.socket(family, socket.SOCK_STREAM)
