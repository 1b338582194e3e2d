"""File transfer between ranks: one connection per direction of a pair, one answer per file.

A file is sent as the lengths of its folder name, file name and content, then these. The answer is
one byte: whether the receiver has stored the complete file.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fxpart.checkpoint import files
from fxpart.runtime.checkpointing.memory_store import MemoryCheckpointStore
from fxpart.runtime.transport.handshake import (
    SocketKind,
    Spread,
    accept_ranks,
    connect_to_rank,
    open_listener,
    receive_exactly,
)

_HEAD = struct.Struct("<HHQ")
_LONGEST = 300  # bytes of a name
_CHUNK = 1 << 20
_SECONDS = 20.0
Peers = dict[int, socket.socket]


def connect_ranks(
    rank: int, spread: Spread, kind: SocketKind, to: Sequence[int], of: Sequence[int]
) -> tuple[Peers, Peers] | None:
    """Connect to some ranks and accept others; None on every rank if any connection fails.

    spread: all-gathers a message. All ranks call it at the same time; ``of`` are the ranks with
    this rank in ``to``.
    """
    listener: socket.socket | None = None
    token = mine = b""
    with suppress(OSError):
        listener, token, mine = open_listener(kind, max(len(of), 1))
    offers = spread(mine)
    out: Peers = {}
    into: Peers = {}
    limit = time.monotonic() + _SECONDS
    if listener is not None and all(offers):
        open_listener_ = listener

        def accept() -> None:
            with suppress(OSError):
                accept_ranks(open_listener_, of, token, into, limit)

        # In a thread: ranks that connect to each other in a ring would all wait for an answer.
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        with suppress(OSError):
            for other in to:
                out[other] = connect_to_rank(kind, rank, offers[other], limit)
        acceptor.join()
    if listener is not None:
        listener.close()
    complete = len(out) == len(to) and len(into) == len(of)
    if all(spread(b"\1" if complete else b"")):
        return out, into
    for peer in (*out.values(), *into.values()):
        peer.close()
    return None


def send_file(peer: socket.socket, where: str, path: Path, patience: float) -> bool:
    """Send a file; return whether the receiver has stored it. Raises OSError.

    patience: seconds without any progress.
    """
    names = where.encode(), path.name.encode()
    with files.open_for_reading(path) as (file, size):
        peer.settimeout(patience)
        peer.sendall(_HEAD.pack(len(names[0]), len(names[1]), size) + b"".join(names))
        if size and peer.sendfile(file, 0, size) != size:
            raise OSError(0, f"{path.name} was truncated while it was sent")
    return receive_exactly(peer, 1, time.monotonic() + patience) == b"\1"


def receive_file(
    peer: socket.socket, memory: MemoryCheckpointStore | None, patience: float
) -> bool:
    """Receive the next file into memory; False if the sender has closed. Raises OSError.

    memory: None if this host has none: the file is rejected. The next file is awaited without a
    limit; within a file, at most patience seconds without progress.
    """
    peer.settimeout(None)
    first = peer.recv(1)
    if not first:
        return False
    head = first + receive_exactly(peer, _HEAD.size - 1, time.monotonic() + patience)
    lengths = _HEAD.unpack(head)
    if max(lengths[:2]) > _LONGEST:
        raise ConnectionError("the peer does not speak this protocol")
    where, name = (
        receive_exactly(peer, length, time.monotonic() + patience).decode()
        for length in lengths[:2]
    )
    remainder = _FileRemainder(lengths[2])
    try:
        if memory is None:
            raise OSError(0, "no memory")
        with memory.create(where, name) as file:
            remainder.receive(peer, file, patience)
        answer = b"\1"
    except _BrokenConnectionError as cause:
        raise cause.cause from cause
    except (OSError, ValueError):
        remainder.receive(peer, None, patience)  # skip to the next file
        answer = b"\0"
    peer.settimeout(patience)
    peer.sendall(answer)
    return True


class _BrokenConnectionError(Exception):
    """A failure of the connection, not of the file."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _FileRemainder:
    """Remaining bytes of a file."""

    def __init__(self, size: int) -> None:
        self.size = size

    def receive(self, peer: socket.socket, file: BinaryIO | None, patience: float) -> None:
        buffer = memoryview(bytearray(min(_CHUNK, max(self.size, 1))))
        peer.settimeout(patience)
        while self.size:
            try:
                got = peer.recv_into(buffer[: min(self.size, len(buffer))])
                if not got:
                    raise ConnectionError("the peer has closed the connection")
            except OSError as cause:
                raise _BrokenConnectionError(cause) from cause
            self.size -= got
            if file is not None:
                files.write(file, buffer[:got])
