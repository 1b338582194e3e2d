"""Files between ranks: for each direction of a pair a connection of its own, and an answer to each.

A file is its place's and its own name, its length and its bytes; the answer is one byte, which says
whether the other end has it whole.
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
    """Connections to some ranks, and from others; None on every rank if any is not reached.

    spread: gives a message to all processes and returns everybody's, in order of rank. Called at
    the same time by all ranks; ``of`` is who has this rank in ``to``.
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
        door = listener

        def let_in() -> None:
            with suppress(OSError):
                accept_ranks(door, of, token, into, limit)

        # Meanwhile: ranks that call each other in a ring would all wait for an answer.
        porter = threading.Thread(target=let_in, daemon=True)
        porter.start()
        with suppress(OSError):
            for other in to:
                out[other] = connect_to_rank(kind, rank, offers[other], limit)
        porter.join()
    if listener is not None:
        listener.close()
    whole = len(out) == len(to) and len(into) == len(of)
    if all(spread(b"\1" if whole else b"")):
        return out, into
    for peer in (*out.values(), *into.values()):
        peer.close()
    return None


def send_file(peer: socket.socket, where: str, path: Path, patience: float) -> bool:
    """Send a file and wait for the answer: whether the other end has it. OSError.

    patience: seconds without any progress.
    """
    names = where.encode(), path.name.encode()
    with files.open_for_reading(path) as (file, size):
        peer.settimeout(patience)
        peer.sendall(_HEAD.pack(len(names[0]), len(names[1]), size) + b"".join(names))
        if size and peer.sendfile(file, 0, size) != size:
            raise OSError(0, f"{path.name} has become shorter")
    return receive_exactly(peer, 1, time.monotonic() + patience) == b"\1"


def receive_file(
    peer: socket.socket, memory: MemoryCheckpointStore | None, patience: float
) -> bool:
    """Take the next file into memory and answer; False where the other end has closed. OSError.

    memory: None where this machine has none to give: the answer is no.
    The next file is waited for without end; within one, patience seconds without progress.
    """
    peer.settimeout(None)
    first = peer.recv(1)
    if not first:
        return False
    head = first + receive_exactly(peer, _HEAD.size - 1, time.monotonic() + patience)
    lengths = _HEAD.unpack(head)
    if max(lengths[:2]) > _LONGEST:
        raise ConnectionError("another process")
    where, name = (
        receive_exactly(peer, length, time.monotonic() + patience).decode()
        for length in lengths[:2]
    )
    left = _FileRemainder(lengths[2])
    try:
        if memory is None:
            raise OSError(0, "no memory")
        with memory.filling(where, name) as file:
            left.pour(peer, file, patience)
        answer = b"\1"
    except _BrokenConnectionError as cause:
        raise cause.cause from cause
    except (OSError, ValueError):
        left.pour(peer, None, patience)  # what follows is the next file's
        answer = b"\0"
    peer.settimeout(patience)
    peer.sendall(answer)
    return True


class _BrokenConnectionError(Exception):
    """The connection, not the file, has failed."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _FileRemainder:
    """What is still to come of a file."""

    def __init__(self, size: int) -> None:
        self.size = size

    def pour(self, peer: socket.socket, file: BinaryIO | None, patience: float) -> None:
        buffer = memoryview(bytearray(min(_CHUNK, max(self.size, 1))))
        peer.settimeout(patience)
        while self.size:
            try:
                got = peer.recv_into(buffer[: min(self.size, len(buffer))])
                if not got:
                    raise ConnectionError("the other end has closed")
            except OSError as cause:
                raise _BrokenConnectionError(cause) from cause
            self.size -= got
            if file is not None:
                files.write(file, buffer[:got])
