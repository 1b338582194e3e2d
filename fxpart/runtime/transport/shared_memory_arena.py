"""Shared memory of two processes: the sender's slots, and the receiver's view of them.

A region is an anonymous kernel file (memfd) that both processes have mapped. It has no name, so it
disappears when both have ended, however they ended. It starts with one byte per slot: the sender
sets it when it fills the slot, the receiver clears it when nothing refers to the message any more.
Freeing needs no message, and any thread may drop the last tensor. The required memory ordering is
implied: a filled slot is announced by a system call, and a tensor's memory is freed by an atomic
decrement.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

HEAD = 4096  # Bytes of a region before its slots; also of the counters.
_SHARED = 1 << 20  # Slots up to this size share a region of about this size.
_MOST = 256  # Slots of a region.
_FEW = 16  # Of larger slots; a region takes a descriptor on both sides, and memory as it is used.
_ALIGNED = 64
_PAGE = 4096
# Memory without recent messages is released: unused memory above IDLE bytes, after AGE calls of
# ``tidy`` (steps).
IDLE = 64 << 20
AGE = 16


def create_region(size: int) -> tuple[int, mmap.mmap]:
    """Create a region; return its descriptor and mapping; OSError if that fails."""
    create: Callable[[str, int], int] | None = getattr(os, "memfd_create", None)
    if create is None:
        raise OSError("this system has no anonymous files")
    descriptor = create("fxpart", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return descriptor, map_region(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise


def map_region(descriptor: int, size: int) -> mmap.mmap:
    """Map the region of a descriptor; pages are allocated at first use."""
    return mmap.mmap(descriptor, size)


def compute_slot_size(size: int) -> int:
    """Return the slot size for messages of ``size`` bytes: at most an eighth more, aligned."""
    step = max(_ALIGNED, 1 << max(0, (size - 1).bit_length() - 4))
    if size > _SHARED:
        step = max(step, _PAGE)
    return -(-size // step) * step


class ArenaSlot:
    """Space for one message. region, index: its position, as both processes name it."""

    __slots__ = ("_key", "_memory", "_offset", "_room", "flags", "index", "region")

    def __init__(
        self, memory: mmap.mmap, flags: memoryview, region: int, index: int, size: int
    ) -> None:
        """size: of the region's slots."""
        self.flags = flags
        self.region = region
        self.index = index
        self._memory = memory
        self._offset = HEAD + index * size
        self._key: tuple[Any, ...] = ()
        self._room: torch.Tensor | None = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a tensor in; the slot belongs to the receiver from then on."""
        room = self._get_room(tensor.dtype, tuple(tensor.shape))
        room.copy_(tensor.detach() if tensor.requires_grad else tensor)
        self.flags[self.index] = 1

    def fill_with_parts(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy flat tensors of one dtype in, one after the other."""
        room = self._get_room(parts[0].dtype, (sum(part.numel() for part in parts),))
        torch.cat([part.detach() for part in parts], out=room)
        self.flags[self.index] = 1

    def _get_room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slot's memory as a tensor."""
        if (dtype, shape) != self._key or self._room is None:
            count = prod(shape)
            self._room = torch.frombuffer(
                self._memory, dtype=dtype, count=count, offset=self._offset
            ).view(shape)
            self._key = (dtype, shape)
        return self._room


class Arena:
    """The slots for messages to one other process; it grows with the data in flight.

    The schedule bounds the data in flight: a message stays until its receiver has dropped it, as a
    tensor in the receiver's own memory would.
    """

    def __init__(self, announce: Callable[[int, int, int, int], None]) -> None:
        """announce: called for a new region with number, descriptor, slot size and size.

        For a released region the descriptor is -1.
        """
        self._announce = announce
        # By slot size; slots of one region are consecutive.
        self._slots: dict[int, list[ArenaSlot]] = {}
        self._regions: dict[int, tuple[int, int]] = {}  # Slot size and bytes.
        self._used: dict[int, int] = {}  # When a region was last in use.
        self._made = 0
        self._now = 0

    @property
    def size(self) -> int:
        """Bytes of all regions; unused pages take no memory."""
        return sum(size for _, size in self._regions.values())

    def take(self, size: int) -> ArenaSlot:
        """Return a free slot for ``size`` bytes; OSError if no new region can be allocated."""
        size = compute_slot_size(size)
        for slot in self._slots.get(size, ()):
            if not slot.flags[slot.index]:
                self._used[slot.region] = self._now
                return slot
        return self._grow(size)

    def tidy(self) -> None:
        """Release regions that have not been used for long, above IDLE bytes."""
        self._now += 1
        if self.size <= IDLE:
            return
        idle = []
        for number, (size, whole) in self._regions.items():
            busy = any(s.flags[s.index] for s in self._slots[size] if s.region == number)
            if busy:
                self._used[number] = self._now
            elif self._now - self._used[number] > AGE:
                idle.append((self._used[number], number, size, whole))
        kept = sum(whole for *_, whole in idle)
        for _, number, size, whole in sorted(idle):
            if kept <= IDLE:
                break
            kept -= whole
            self._slots[size] = [s for s in self._slots[size] if s.region != number]
            del self._regions[number], self._used[number]
            self._announce(number, -1, 0, 0)

    def _grow(self, size: int) -> ArenaSlot:
        so_far = len(self._slots.get(size, ()))
        count = max(1, min(_MOST, _SHARED // size), min(_FEW, so_far // 2))
        whole = HEAD + count * size
        descriptor, memory = create_region(whole)
        number, self._made = self._made, self._made + 1
        try:
            self._announce(number, descriptor, size, whole)
        finally:
            os.close(descriptor)
        flags = memoryview(memory)[:HEAD]
        slots = [ArenaSlot(memory, flags, number, index, size) for index in range(count)]
        self._slots.setdefault(size, []).extend(slots)
        self._regions[number], self._used[number] = (size, whole), self._now
        return slots[0]


class _SlotLease(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a message's memory; stored by its region until it is freed."""

    __slots__ = ("index", "region")
    region: MappedRegion
    index: int


class MappedRegion:
    """Another process's region, unmapped when nothing refers to it or to its messages."""

    def __init__(self, descriptor: int, size: int, whole: int) -> None:
        """size: of a slot. whole: of the region. OSError if it cannot be mapped."""
        self._bytes = memoryview(map_region(descriptor, whole))
        self._size = size
        self._leases: dict[int, _SlotLease] = {}

    def message(self, index: int, count: int) -> memoryview:
        """Return the bytes of a filled slot, which is freed when nothing refers to them."""
        start = HEAD + index * self._size
        found = self._bytes[start : start + count]
        if len(found) != count:
            raise ConnectionError("the peer announced more bytes than the region has")
        watch = _SlotLease(found, _free_slot)
        watch.region, watch.index = self, index
        self._leases[index] = watch
        return found

    def free(self, watch: _SlotLease) -> None:
        """Free the slot; forget it first, since it may be filled again at once."""
        self._leases.pop(watch.index, None)
        self._bytes[watch.index] = 0


def _free_slot(watch: Any) -> None:
    watch.region.free(watch)


def view_as_tensor(message: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor that uses a message's memory, which lives as long as its storage."""
    return torch.frombuffer(message, dtype=dtype).resize_(shape)
