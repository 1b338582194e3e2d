"""The connection of two processes of one host: announcements of messages in shared memory."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from fxpart.runtime.transport.handshake import receive_exactly
from fxpart.runtime.transport.shared_memory_arena import (
    HEAD,
    Arena,
    ArenaSlot,
    MappedRegion,
    create_region,
    map_region,
)

# Messages of a channel without a posted receive, beyond which a send waits.
AHEAD = 4
_RECORD = struct.Struct("<BBxxIQQ")  # Kind, channel or none, region, two numbers.
_MESSAGE, _REGION, _GONE = 1, 2, 3
_READ = 1 << 14
_DESCRIPTORS = socket.CMSG_SPACE(64 * 4) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSED_IN_CHILDREN = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_HELLO_SECONDS = 20.0


class SharedMemoryReceive:
    """A posted receive: its message once it has arrived, then the tensor."""

    __slots__ = ("copied", "dtype", "link", "message", "shape", "tensor")

    def __init__(
        self, link: SharedMemoryPeer, shape: tuple[int, ...], dtype: torch.dtype, copied: bool
    ) -> None:
        """Expect a message of this shape and dtype. copied: copy it to own memory."""
        self.link = link
        self.shape = shape
        self.dtype = dtype
        self.copied = copied
        self.message: memoryview | None = None
        self.tensor: torch.Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether the message has arrived."""
        return self.message is not None or self.tensor is not None


class SharedMemorySend:
    """A send: number ``count`` of its channel. Its tensor has been copied."""

    __slots__ = ("channel", "count", "link")

    def __init__(self, link: SharedMemoryPeer, channel: int, count: int) -> None:
        """link: to the receiver."""
        self.link = link
        self.channel = channel
        self.count = count

    @property
    def done(self) -> bool:
        """Whether at most AHEAD messages up to this one lack a posted receive."""
        return self.link.wanted[self.channel] >= self.count - AHEAD


class SharedMemoryPeer:
    """Both directions between this process and another."""

    def __init__(
        self, rank: int, peer: socket.socket, out: mmap.mmap, back: mmap.mmap, channels: int
    ) -> None:
        """out: counters of own sends, written by the peer; back: counters of own receives."""
        self.rank = rank
        self.peer = peer
        self.wanted = memoryview(out).cast("Q")  # By channel, receives posted by the peer.
        self.sent = [0] * channels
        self.arrived: list[deque[memoryview]] = [deque() for _ in range(channels)]
        self.posted: list[deque[SharedMemoryReceive]] = [deque() for _ in range(channels)]
        self.arena = Arena(self._announce)
        self.lost = ""
        self.write: Callable[[bytes, list[int]], None]
        self._wanted = memoryview(back).cast("Q")
        self._regions: dict[int, MappedRegion] = {}
        self._descriptors: deque[int] = deque()
        self._rest = b""

    def post(self, channel: int, receive: SharedMemoryReceive) -> None:
        """Assign the channel's next message to this receive."""
        self._wanted[channel] += 1
        if self.arrived[channel]:
            receive.message = self.arrived[channel].popleft()
        else:
            self.posted[channel].append(receive)

    def read(self) -> bool:
        """Read announcements without waiting, and record a lost connection.

        Returns whether there was anything.
        """
        try:
            data, beside, _, _ = self.peer.recvmsg(_READ, _DESCRIPTORS, _CLOSED_IN_CHILDREN)
        except BlockingIOError:
            return False
        except OSError as cause:
            self.lost = f"rank {self.rank} closed the connection: {cause}"
            return False
        for level, kind, found in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(struct.unpack(f"{len(found) // 4}i", found))
        if not data:
            self.lost = f"rank {self.rank} closed the connection"
            return False
        if self._rest:
            data = self._rest + data
        whole = len(data) - len(data) % _RECORD.size
        self._rest = data[whole:]
        try:
            for what, channel, region, first, second in _RECORD.iter_unpack(data[:whole]):
                if what == _MESSAGE:
                    self._store_message(channel, self._regions[region].message(first, second))
                elif what == _REGION:
                    self._map_region(region, first, second)
                else:
                    self._regions.pop(region)
        except (OSError, LookupError) as cause:
            self.lost = f"the data of rank {self.rank} cannot be decoded: {cause!r}"
        return not self.lost

    def _store_message(self, channel: int, message: memoryview) -> None:
        if self.posted[channel]:
            self.posted[channel].popleft().message = message
        else:
            self.arrived[channel].append(message)

    def _map_region(self, region: int, size: int, whole: int) -> None:
        descriptor = self._descriptors.popleft()
        try:
            self._regions[region] = MappedRegion(descriptor, size, whole)
        finally:
            os.close(descriptor)

    def _announce(self, region: int, descriptor: int, size: int, whole: int) -> None:
        if descriptor < 0:
            self.write(_RECORD.pack(_GONE, 0, region, 0, 0), [])
        else:
            self.write(_RECORD.pack(_REGION, 0, region, size, whole), [descriptor])

    def make_record(self, channel: int, slot: ArenaSlot, size: int) -> bytes:
        """Count a message of a channel; return its announcement."""
        self.sent[channel] += 1
        return _RECORD.pack(_MESSAGE, channel, slot.region, slot.index, size)

    def close(self) -> None:
        """Close the connection; received tensors stay valid."""
        self.peer.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def exchange_counters(peers: Mapping[int, socket.socket], channels: int) -> list[SharedMemoryPeer]:
    """Create the links, each with counters in both directions; verifies that memory is shared."""
    limit = time.monotonic() + _HELLO_SECONDS
    mine: dict[int, mmap.mmap] = {}
    for rank, peer in peers.items():
        descriptor, mine[rank] = create_region(HEAD)
        mine[rank][-1] = 1
        try:
            peer.settimeout(_HELLO_SECONDS)
            socket.send_fds(peer, [b"\1"], [descriptor])
        finally:
            os.close(descriptor)
    links = []
    for rank, peer in peers.items():
        peer.settimeout(max(limit - time.monotonic(), 1e-3))
        data, descriptors, *_ = socket.recv_fds(peer, 1, 1)
        if not data or not descriptors:
            raise ConnectionError("the peer sent no memory")
        try:
            back = map_region(descriptors[0], HEAD)
        finally:
            os.close(descriptors[0])
        if back[-1] != 1:
            raise ConnectionError("the received memory is not the peer's")
        back[-1] = 2
        links.append(SharedMemoryPeer(rank, peer, mine[rank], back, channels))
    for link in links:  # All have mapped the memory and see the peers' writes.
        link.peer.settimeout(max(limit - time.monotonic(), 1e-3))
        link.peer.sendall(b"\2")
    for link in links:
        if receive_exactly(link.peer, 1, limit) != b"\2" or mine[link.rank][-1] != 2:
            raise ConnectionError("the memory is not shared")
    return links
