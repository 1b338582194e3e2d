"""Memory that two processes share: the sender's slots, and the receiver's view of them.

A region is an anonymous file of the kernel's (memfd) that both have mapped. It has no name, so
nothing of it is left when both are gone, however they ended. In front it has a byte for each of its
slots: the sender sets it when it fills the slot, the receiver clears it when nothing refers to the
message any more. So freeing costs no message, and may be done by whichever thread drops the last
tensor. The orders between processors that this needs come with it: a filled slot is announced by a
system call, and a tensor's memory is given up by an atomic decrement.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

HEAD = 4096  # bytes of a region in front of its slots; also of a ledger
_SHARED = 1 << 20  # slots up to this size share a region of about this size
_MOST = 256  # slots of a region
_FEW = 16  # of larger ones; a region takes a descriptor on either side, and memory as it is used
_ALIGNED = 64
_PAGE = 4096
# Memory that no message has used lately goes back: what is unused beyond IDLE bytes, after AGE
# calls of ``tidy``, which are steps.
IDLE = 64 << 20
AGE = 16


def create_region(size: int) -> tuple[int, mmap.mmap]:
    """A new region and its descriptor; OSError where the system has none to give."""
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
    """The region of a descriptor. Its pages come when they are first used."""
    return mmap.mmap(descriptor, size)


def compute_slot_size(size: int) -> int:
    """The size of the slots for messages of ``size`` bytes: at most an eighth more, aligned."""
    step = max(_ALIGNED, 1 << max(0, (size - 1).bit_length() - 4))
    if size > _SHARED:
        step = max(step, _PAGE)
    return -(-size // step) * step


class ArenaSlot:
    """Room for one message. region, index: its place, as both processes name it."""

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
        """Copy a tensor in; from then on the slot is the receiver's."""
        key = (tensor.dtype, tensor.shape)
        if key != self._key:
            self._room = torch.frombuffer(
                self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._offset
            ).view(tensor.shape)
            self._key = key
        assert self._room is not None
        self._room.copy_(tensor.detach() if tensor.requires_grad else tensor)
        self.flags[self.index] = 1


class Arena:
    """The slots for messages to one other process; it grows with what is under way at once.

    What is under way is limited by the schedule: a message stays until its receiver has dropped
    it, as a tensor would that it had received into memory of its own.
    """

    def __init__(self, announce: Callable[[int, int, int, int], None]) -> None:
        """announce: told of a new region: its number, descriptor, size of slots and size; and of
        one that is given back, with descriptor -1."""
        self._announce = announce
        self._slots: dict[int, list[ArenaSlot]] = {}  # by size, those of one region in a row
        self._regions: dict[int, tuple[int, int]] = {}  # slot size and bytes
        self._used: dict[int, int] = {}  # when a region was in use last
        self._made = 0
        self._now = 0

    @property
    def size(self) -> int:
        """Bytes of all regions; what was never used of them takes no memory."""
        return sum(size for _, size in self._regions.values())

    def take(self, size: int) -> ArenaSlot:
        """A free slot for so many bytes; OSError where there is no memory for a new one."""
        size = compute_slot_size(size)
        for slot in self._slots.get(size, ()):
            if not slot.flags[slot.index]:
                self._used[slot.region] = self._now
                return slot
        return self._grow(size)

    def tidy(self) -> None:
        """Give back regions that have not been in use for long, beyond IDLE bytes."""
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
    """Watches the memory of a message; kept by its region until that is free."""

    __slots__ = ("index", "region")
    region: MappedRegion
    index: int


class MappedRegion:
    """Another process's region. Unmapped when nothing refers to it or to a message in it."""

    def __init__(self, descriptor: int, size: int, whole: int) -> None:
        """size: of a slot. whole: of the region. OSError where it cannot be mapped."""
        self._bytes = memoryview(map_region(descriptor, whole))
        self._size = size
        self._held: dict[int, _SlotLease] = {}

    def message(self, index: int, count: int) -> memoryview:
        """The bytes of a filled slot. It is given back when nothing refers to them any more."""
        start = HEAD + index * self._size
        found = self._bytes[start : start + count]
        if len(found) != count:
            raise ConnectionError("the other end announced more than it has")
        watch = _SlotLease(found, _freed)
        watch.region, watch.index = self, index
        self._held[index] = watch
        return found

    def free(self, watch: _SlotLease) -> None:
        """The slot may be filled again; forgotten first, since it may be so at once."""
        self._held.pop(watch.index, None)
        self._bytes[watch.index] = 0


def _freed(watch: Any) -> None:
    watch.region.free(watch)


def view_as_tensor(message: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on a message's own memory, which lasts as long as its storage."""
    return torch.frombuffer(message, dtype=dtype).resize_(shape)
