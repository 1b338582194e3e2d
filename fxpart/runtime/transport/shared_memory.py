"""Transfers between processes of one host through shared memory.

A send copies the tensor into a slot of memory that the receiver has mapped too, and announces it by
a few bytes over a Unix socket. The received tensor uses that memory without another copy or thread.
The slot is free again when the tensor is dropped. Received tensors need no memory of their own:
data in flight is in the arena of its sender (see
:class:`~fxpart.runtime.transport.shared_memory_arena.Arena`), whose pages count in the resident
sets of both processes.

A waiting process reads announcements from all others, on any channel. So two ranks that send to
each other cannot block each other, and a full socket is emptied. A send only waits if the receiver
has not posted enough receives, whether or not it reads its socket: a rank in a collective blocks no
other.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from fxpart.collectives.failures import NO_RANK, waiting
from fxpart.runtime.transport.handshake import (
    AbstractUnixSockets,
    Spread,
    connect_all_pairs,
    receive_exactly,
)
from fxpart.runtime.transport.interface import STATE, PeerLostError, TransferTimeoutError
from fxpart.runtime.transport.shared_memory_arena import (
    HEAD,
    Arena,
    ArenaSlot,
    MappedRegion,
    create_region,
    map_region,
    view_as_tensor,
)

# Messages of a channel without a posted receive, beyond which a send waits.
AHEAD = 4
_RECORD = struct.Struct("<BBxxIQQ")  # Kind, channel or none, region, two numbers.
_MESSAGE, _REGION, _GONE = 1, 2, 3
_CHANNELS = STATE + 1
MOST_CHANNELS = 256  # A record has a byte for the channel.
_READ = 1 << 14
_ANNOUNCED = 1 << 20  # Bytes of announcements in flight, if the system allows so many.
_DESCRIPTORS = socket.CMSG_SPACE(64 * 4) if hasattr(socket, "CMSG_SPACE") else 0
_CLOSED_IN_CHILDREN = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_LOOK = 1.0  # Milliseconds between polls of a receiver's progress.
_HELLO_SECONDS = 20.0
_EMPTY = torch.empty(0)


class SharedMemoryReceive:
    """A posted receive: its message once it has arrived, then the tensor."""

    __slots__ = ("copied", "dtype", "link", "message", "shape", "tensor")

    def __init__(
        self, link: _SharedMemoryPeer, shape: tuple[int, ...], dtype: torch.dtype, copied: bool
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

    def __init__(self, link: _SharedMemoryPeer, channel: int, count: int) -> None:
        """link: to the receiver."""
        self.link = link
        self.channel = channel
        self.count = count

    @property
    def done(self) -> bool:
        """Whether at most AHEAD messages up to this one lack a posted receive."""
        return self.link.wanted[self.channel] >= self.count - AHEAD


class _SharedMemoryPeer:
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

    def close(self) -> None:
        """Close the connection; received tensors stay valid."""
        self.peer.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


class SharedMemory:
    """Point-to-point transfers of CPU tensors with the other processes of this host.

    Use it from one thread at a time. After a failed transfer all connections are closed, so that
    the other ranks notice at once.
    """

    def __init__(
        self, links: Sequence[_SharedMemoryPeer], timeout: float, copied: Collection[int] = ()
    ) -> None:
        """links: to all other ranks. timeout: maximum seconds of a wait.

        copied: channels whose received tensors get memory of their own.
        Create it with :func:`connect_shared_memory`.
        """
        self.timeout = timeout
        self._copied = frozenset(copied)
        self._links = {link.rank: link for link in links}
        self._at = {link.peer.fileno(): link for link in links}
        self._poll = select.poll()
        for link in links:
            link.peer.setblocking(False)
            link.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ANNOUNCED)
            self._poll.register(link.peer, select.POLLIN)
            link.write = self._make_write(link)

    def send(self, target: int, channel: int, tensor: torch.Tensor) -> SharedMemorySend:
        """Copy a non-empty tensor to shared memory and announce it; PeerLostError."""
        return self.send_all(target, channel, [tensor])[0]

    def send_all(
        self, target: int, channel: int, tensors: Sequence[torch.Tensor]
    ) -> list[SharedMemorySend]:
        """Send several tensors as separate messages, with one announcement."""
        link, sent, records = self._links[target], self._links[target].sent, b""
        handles = []
        for tensor in tensors:
            size = tensor.numel() * tensor.itemsize
            slot = self._take_slot(link, size)
            slot.fill(tensor)
            records += _RECORD.pack(_MESSAGE, channel, slot.region, slot.index, size)
            sent[channel] += 1
            handles.append(SharedMemorySend(link, channel, sent[channel]))
        link.write(records, [])
        return handles

    def send_parts(self, target: int, channel: int, parts: Sequence[torch.Tensor]) -> None:
        """Send flat tensors of one dtype as one message, without a copy between."""
        link = self._links[target]
        size = sum(part.numel() for part in parts) * parts[0].itemsize
        slot = self._take_slot(link, size)
        slot.fill_with_parts(parts)
        link.sent[channel] += 1
        link.write(_RECORD.pack(_MESSAGE, channel, slot.region, slot.index, size), [])

    def _take_slot(self, link: _SharedMemoryPeer, size: int) -> ArenaSlot:
        try:
            return link.arena.take(size)
        except OSError as cause:
            why = f"{size} bytes of shared memory cannot be allocated: {cause}"
            raise self._close_after(PeerLostError(why)) from cause

    def post(
        self, source: int, channel: int, shape: Sequence[int], dtype: torch.dtype
    ) -> SharedMemoryReceive:
        """Announce a receive of the channel's next tensor from ``source``."""
        link = self._links[source]
        receive = SharedMemoryReceive(link, tuple(shape), dtype, channel in self._copied)
        link.post(channel, receive)
        return receive

    def wait(self, handle: SharedMemorySend | SharedMemoryReceive) -> torch.Tensor:
        """Return the received tensor; for a send, wait for the receiver and return an empty one.

        TransferTimeoutError, PeerLostError.
        """
        if not handle.done:
            self._wait_until_done(handle)
        if isinstance(handle, SharedMemorySend):
            return _EMPTY
        if handle.message is not None:
            size = handle.dtype.itemsize
            for extent in handle.shape:
                size *= extent
            if len(handle.message) != size:
                why = f"rank {handle.link.rank} sent {len(handle.message)} bytes instead of {size}"
                raise self._close_after(PeerLostError(why))
            tensor = view_as_tensor(handle.message, handle.dtype, handle.shape)
            # State that users may keep must not stay in the sender's arena.
            handle.tensor = tensor.clone() if handle.copied else tensor
            handle.message = None
        assert handle.tensor is not None
        return handle.tensor

    def tidy(self) -> None:
        """Release memory that was unused for long; called once per step."""
        for link in self._links.values():
            if not link.lost:
                link.arena.tidy()

    @property
    def size(self) -> int:
        """Bytes of this process's arenas, shared with its receivers."""
        return sum(link.arena.size for link in self._links.values())

    def wake(self) -> None:
        """End all current and later waits after a rank was lost; callable from any thread."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; received tensors stay valid."""
        for link in self._links.values():
            link.lost = link.lost or "the transport is closed"
            link.close()

    def _wait_until_done(self, handle: SharedMemorySend | SharedMemoryReceive) -> None:
        """Wait; read announcements of all peers meanwhile."""
        link, limit = handle.link, 0.0
        waiting.rank, waiting.since = link.rank, time.monotonic()
        while not handle.done:
            if link.lost:
                raise self._close_after(PeerLostError(link.lost))
            now = time.monotonic()
            limit = limit or now + self.timeout
            if now >= limit:
                why = f"no data from rank {link.rank}"
                raise self._close_after(TransferTimeoutError(self.timeout, why))
            left = 1e3 * (limit - now)
            self._read_announcements(
                min(left, _LOOK) if isinstance(handle, SharedMemorySend) else left
            )
        waiting.rank = NO_RANK

    def _read_announcements(self, milliseconds: float) -> None:
        """Read announcements for the given time, and remove lost peers."""
        for descriptor, _ in self._poll.poll(milliseconds):
            link = self._at.get(descriptor)
            if link is not None:
                link.read()
                if link.lost:
                    self._poll.unregister(descriptor)
                    del self._at[descriptor]

    def _make_write(self, link: _SharedMemoryPeer) -> Callable[[bytes, list[int]], None]:
        """Return the write function of a peer; if its socket is full, it reads announcements."""

        def write(record: bytes, descriptors: list[int]) -> None:
            limit = 0.0
            while record:
                if link.lost:
                    raise self._close_after(PeerLostError(link.lost))
                try:
                    if descriptors:
                        sent = socket.send_fds(link.peer, [record], descriptors)
                        descriptors = []
                    else:
                        sent = link.peer.send(record)
                    record = record[sent:]
                except BlockingIOError:
                    now = time.monotonic()
                    limit = limit or now + self.timeout
                    if now >= limit:
                        why = f"rank {link.rank} does not read"
                        raise self._close_after(TransferTimeoutError(self.timeout, why)) from None
                    self._read_announcements(_LOOK)
                except OSError as cause:
                    while link.read():  # What it had sent before.
                        pass
                    link.lost = link.lost or f"rank {link.rank} closed the connection: {cause}"

        return write

    def _close_after(self, cause: Exception) -> Exception:
        """Close all connections after a failure, so that other ranks do not wait for this one."""
        for link in self._links.values():
            try:
                link.peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        return cause


def connect_shared_memory(
    rank: int,
    ranks: int,
    spread: Spread,
    timeout: float,
    *,
    channels: int = _CHANNELS,
    copied: Collection[int] = (STATE,),
) -> SharedMemory | None:
    """Connect all ranks by shared memory; return None on every rank if any pair cannot.

    It fails if the ranks are not on one host, or the system is not Linux. spread: see
    :func:`fxpart.runtime.transport.handshake.connect_all_pairs`. channels: at most MOST_CHANNELS.
    copied: see :class:`SharedMemory`.
    """
    peers = connect_all_pairs(rank, ranks, spread, AbstractUnixSockets())
    if peers is None:
        return None
    links: list[_SharedMemoryPeer] = []
    try:
        links = _exchange_counters(peers, channels)
    except OSError:
        for peer in peers.values():  # Release waiting peers; all ranks are informed below.
            peer.close()
    if all(spread(b"\1" if len(links) == ranks - 1 else b"")):
        return SharedMemory(links, timeout, copied)
    for peer in peers.values():
        peer.close()
    return None


def _exchange_counters(
    peers: Mapping[int, socket.socket], channels: int
) -> list[_SharedMemoryPeer]:
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
        links.append(_SharedMemoryPeer(rank, peer, mine[rank], back, channels))
    for link in links:  # All have mapped the memory and see the peers' writes.
        link.peer.settimeout(max(limit - time.monotonic(), 1e-3))
        link.peer.sendall(b"\2")
    for link in links:
        if receive_exactly(link.peer, 1, limit) != b"\2" or mine[link.rank][-1] != 2:
            raise ConnectionError("the memory is not shared")
    return links
