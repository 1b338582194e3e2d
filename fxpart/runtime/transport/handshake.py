"""Connections between processes: a socket for each pair, authenticated by tokens.

The default process group distributes all addresses and a random token per rank. A rank accepts only
connections that prove its token, and proves it in return. On one host, connections of other users
are closed unread, whatever they know.
"""

from __future__ import annotations

import hmac
import io
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fxpart.files import open_regular_file

_TOKEN = 32
_HELLO = struct.Struct(f"<{_TOKEN}sI")
_SECONDS = 20.0
_MOST_CALLERS = 64  # connections that have not proved the token yet
_CREDENTIALS = struct.Struct("iII")  # process, user and group, see unix(7)
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
    """Accept the expected ranks, each once; TimeoutError at the deadline.

    Connections of other users of this host, and those that do not prove the token, are closed.
    Each is read as its bytes arrive, so that one that sends nothing delays no other.
    """
    callers: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        listener.setblocking(False)
        try:
            while not all(rank in peers for rank in expected):
                ready = selector.select(_get_remaining(limit))
                if not ready and time.monotonic() >= limit:
                    raise TimeoutError("not all ranks have connected")
                for key, _ in ready:
                    if key.fileobj is listener:
                        _accept_caller(listener, selector, callers)
                    elif (peer := key.fileobj) in callers:
                        assert isinstance(peer, socket.socket)
                        _read_caller(peer, selector, callers, expected, token, peers)
        finally:
            for peer in callers:
                peer.close()


def _accept_caller(
    listener: socket.socket, selector: selectors.BaseSelector, callers: dict[socket.socket, bytes]
) -> None:
    """Accept a connection of the same user; of too many that have said nothing, end the oldest."""
    try:
        peer, _ = listener.accept()
    except OSError:
        return  # it has ended meanwhile
    if not is_same_user(peer):
        peer.close()
        return
    if len(callers) >= _MOST_CALLERS:
        oldest = next(iter(callers))
        selector.unregister(oldest)
        callers.pop(oldest)
        oldest.close()
    peer.setblocking(False)
    callers[peer] = b""
    selector.register(peer, selectors.EVENT_READ)


def _read_caller(
    peer: socket.socket,
    selector: selectors.BaseSelector,
    callers: dict[socket.socket, bytes],
    expected: Sequence[int],
    token: bytes,
    peers: dict[int, socket.socket],
) -> None:
    """Read what a caller has sent; admit it once it has proved the token."""
    try:
        part = peer.recv(_HELLO.size - len(callers[peer]))
        callers[peer] += part
        if part and len(callers[peer]) < _HELLO.size:
            return
        selector.unregister(peer)
        hello = callers.pop(peer)
        proof, rank = _HELLO.unpack(hello) if part else (b"", -1)
        known = hmac.compare_digest(proof, _make_proof(token, b"call"))
        if not known or rank in peers or rank not in expected:
            raise ConnectionError("an unexpected peer")
        peer.setblocking(True)
        peer.sendall(_make_proof(token, b"answer"))
        peers[rank] = peer
    except BlockingIOError:
        return
    except OSError:
        if peer in callers:
            selector.unregister(peer)
            callers.pop(peer)
        peer.close()


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the other end belongs to this user, as far as the kernel tells.

    Unix sockets have credentials; connections of this host by TCP are listed with their user in
    /proc/net/tcp (Linux). Others are admitted by their token alone.
    """
    try:
        if peer.family == getattr(socket, "AF_UNIX", None):
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()
        if peer.family == socket.AF_INET:
            user = _find_loopback_user(peer.getpeername(), peer.getsockname())
            return user is None or user == os.getuid()
    except (OSError, AttributeError):
        pass
    return True


def _find_loopback_user(
    there: tuple[str, int], here: tuple[str, int], table: str = "/proc/net/tcp"
) -> int | None:
    """Return the user of a socket of this host that is connected to one here; None if unknown."""
    wanted = [f"{_reverse_address(host)}:{port:04X}" for host, port in (there, here)]
    try:
        with open_regular_file(table) as (file, _), io.BufferedReader(file) as lines:
            for line in lines:
                fields = line.decode("ascii", "replace").split()
                if fields[1:3] == wanted:
                    return int(fields[7])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _reverse_address(host: str) -> str:
    """Return an IPv4 address as the kernel prints it."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}"


def _make_proof(token: bytes, what: bytes) -> bytes:
    return hmac.digest(token, what, "sha256")


def _get_remaining(limit: float) -> float:
    return max(limit - time.monotonic(), 1e-3)


def _make_unix_socket() -> socket.socket:
    family = getattr(socket, "AF_UNIX", None)
    if family is None:
        raise OSError("this system has no Unix sockets")
    return socket.socket(family, socket.SOCK_STREAM)
