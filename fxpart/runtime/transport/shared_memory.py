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
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence

import torch

from fxpart.collectives.failures import NO_RANK, waiting
from fxpart.runtime.transport.handshake import AbstractUnixSockets, Spread, connect_all_pairs
from fxpart.runtime.transport.interface import STATE, PeerLostError, TransferTimeoutError
from fxpart.runtime.transport.shared_memory_arena import ArenaSlot, view_as_tensor
from fxpart.runtime.transport.shared_memory_peer import (
    SharedMemoryPeer,
    SharedMemoryReceive,
    SharedMemorySend,
    exchange_counters,
)

_CHANNELS = STATE + 1
MOST_CHANNELS = 256  # A record has a byte for the channel.
_ANNOUNCED = 1 << 20  # Bytes of announcements in flight, if the system allows so many.
_LOOK = 1.0  # Milliseconds between polls of a receiver's progress.
_EMPTY = torch.empty(0)


class SharedMemory:
    """Point-to-point transfers of CPU tensors with the other processes of this host.

    Use it from one thread at a time. After a failed transfer all connections are closed, so that
    the other ranks notice at once.
    """

    def __init__(
        self, links: Sequence[SharedMemoryPeer], timeout: float, copied: Collection[int] = ()
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
        link, records = self._links[target], b""
        handles = []
        for tensor in tensors:
            size = tensor.numel() * tensor.itemsize
            slot = self._take_slot(link, size)
            slot.fill(tensor)
            records += link.make_record(channel, slot, size)
            handles.append(SharedMemorySend(link, channel, link.sent[channel]))
        link.write(records, [])
        return handles

    def send_parts(self, target: int, channel: int, parts: Sequence[torch.Tensor]) -> None:
        """Send flat tensors of one dtype as one message, without a copy between."""
        link = self._links[target]
        size = sum(part.numel() for part in parts) * parts[0].itemsize
        slot = self._take_slot(link, size)
        slot.fill_with_parts(parts)
        link.write(link.make_record(channel, slot, size), [])

    def _take_slot(self, link: SharedMemoryPeer, size: int) -> ArenaSlot:
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

    def _make_write(self, link: SharedMemoryPeer) -> Callable[[bytes, list[int]], None]:
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
    links: list[SharedMemoryPeer] = []
    try:
        links = exchange_counters(peers, channels)
    except OSError:
        for peer in peers.values():  # Release waiting peers; all ranks are informed below.
            peer.close()
    if all(spread(b"\1" if len(links) == ranks - 1 else b"")):
        return SharedMemory(links, timeout, copied)
    for peer in peers.values():
        peer.close()
    return None
