"""Connections between processes: a socket for each pair, authenticated by tokens.

The default process group distributes all addresses and a random token per rank. A rank accepts only
connections that prove its token, and proves it in return.
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
        """Return a listening socket and its address; OSError if the kind is unavailable."""

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Connect to an address; OSError."""


class LoopbackSockets:
    """TCP over the loopback interface."""

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """Listen on any free port."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        return listener, struct.pack("<H", listener.getsockname()[1])

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Connect to the port."""
        (port,) = struct.unpack("<H", address)
        return socket.create_connection(("127.0.0.1", port), seconds)


class NetworkSockets:
    """TCP between hosts, over the interface of an address."""

    def __init__(self, address: str) -> None:
        """address: of this host, as reachable by the others."""
        self._address = address

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """Listen on any free port of that interface only."""
        listener = socket.create_server((self._address, 0), backlog=backlog)
        return listener, f"{listener.getsockname()[1]} {self._address}".encode()

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Connect to the other host's address and port."""
        port, _, host = address.decode().partition(" ")
        return socket.create_connection((host, int(port)), seconds)


class AbstractUnixSockets:
    """Unix sockets with a random abstract name, which ends with its listener (Linux).

    They can also pass file descriptors.
    """

    def listen(self, backlog: int) -> tuple[socket.socket, bytes]:
        """Listen on an unguessable name."""
        listener = _make_unix_socket()
        try:
            name = b"fxpart-" + secrets.token_hex(16).encode()
            listener.bind(b"\0" + name)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
        return listener, name

    def call(self, address: bytes, seconds: float) -> socket.socket:
        """Connect within the given time."""
        made = _make_unix_socket()
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
    """Connect to every other rank; return None on every rank if any pair cannot connect.

    spread: all-gathers a message, in order of rank. Called by all ranks at the same time. others:
    the ranks to connect to, if not all; symmetric between ranks.
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
        pass  # Reported to all by the number of connections, below.
    finally:
        if listener is not None:
            listener.close()
    if all(spread(b"\1" if len(peers) == len(wanted) else b"")):
        return dict(sorted(peers.items()))
    for peer in peers.values():
        peer.close()
    return None


def receive_exactly(peer: socket.socket, count: int, limit: float) -> bytes:
    """Receive ``count`` bytes before the deadline; TimeoutError, ConnectionError."""
    found = b""
    while len(found) < count:
        peer.settimeout(_get_remaining(limit))
        part = peer.recv(count - len(found))
        if not part:
            raise ConnectionError("the peer closed the connection")
        found += part
    return found


def open_listener(kind: SocketKind, backlog: int) -> tuple[socket.socket, bytes, bytes]:
    """Return a listening socket, its token, and the data for :func:`connect_to_rank`."""
    token = secrets.token_bytes(_TOKEN)
    listener, address = kind.listen(backlog)
    return listener, token, token + address


def connect_to_rank(kind: SocketKind, rank: int, offer: bytes, limit: float) -> socket.socket:
    """Connect to a rank, prove its token, and verify that the peer knows it too."""
    token = offer[:_TOKEN]
    peer = kind.call(offer[_TOKEN:], _SECONDS)
    try:
        peer.sendall(_HELLO.pack(_make_proof(token, b"call"), rank))
        if not hmac.compare_digest(
            receive_exactly(peer, _TOKEN, limit), _make_proof(token, b"answer")
        ):
            raise ConnectionError("the peer does not know the token")
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
    """Accept the expected ranks, each once; reject other connections."""
    while not all(rank in peers for rank in expected):
        listener.settimeout(_get_remaining(limit))
        peer, _ = listener.accept()
        try:
            proof, rank = _HELLO.unpack(receive_exactly(peer, _HELLO.size, limit))
            known = hmac.compare_digest(proof, _make_proof(token, b"call"))
            if not known or rank in peers or rank not in expected:
                raise ConnectionError("an unexpected peer")
            peer.sendall(_make_proof(token, b"answer"))
            peers[rank] = peer
        except OSError:
            peer.close()


def _make_proof(token: bytes, what: bytes) -> bytes:
    return hmac.digest(token, what, "sha256")


def _get_remaining(limit: float) -> float:
    return max(limit - time.monotonic(), 1e-3)


def _make_unix_socket() -> socket.socket:
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise OSError("this system has no Unix sockets")
    return socket.socket(family, socket.SOCK_STREAM)
