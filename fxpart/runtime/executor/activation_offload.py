"""Offload of activations: tensors saved for the backward wait in host memory.

Each storage that autograd saves is copied once, while the forward continues. The backward reads the
storages in reverse order, and copies the next few ahead of their use. Per direction at most
``AHEAD`` times the largest storage is on the device without being in use, because the computation
waits for the copy of an older one (as torchtune's ``OffloadActivations``). Weights, buffers, the
inputs of the stage, and small tensors stay on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpart.accelerator import allocate_pinned, get_device_module, is_accelerator
from fxpart.compat import StorageReference, get_write_count
from fxpart.errors import error
from fxpart.plan.offload import AHEAD

LEAST = 1024  # bytes of a storage that is worth a copy


class ActivationOffload:
    """Copies the saved tensors of one stage to the host and back.

    storages, bytes: number and size of the copies to the host so far. largest: bytes of one.
    """

    def __init__(self, module: nn.Module) -> None:
        """module: the stage."""
        self.storages = self.bytes = self.largest = 0
        self._module = module
        self._copies: dict[torch.device, _DeviceCopies] = {}

    def hooks(self, inputs: Iterable[Any]) -> AbstractContextManager[Any]:
        """Return the context of one microbatch's forward. inputs: of the stage."""
        resident = _get_addresses([*self._module.parameters(), *self._module.buffers(), *inputs])
        record = MicrobatchActivations(self, resident)
        return torch.autograd.graph.saved_tensors_hooks(record.pack, _unpack)

    def release(self) -> None:
        """After a backward, release the storages that were not yet released and are not needed."""
        for copies in self._copies.values():
            copies.release_unused()

    def copies(self, device: torch.device) -> _DeviceCopies:
        """Return what copies to and from a device."""
        if device not in self._copies:
            self._copies[device] = _DeviceCopies(device)
        return self._copies[device]


class MicrobatchActivations:
    """The tensors that one forward of a stage saves."""

    def __init__(self, offload: ActivationOffload, resident: frozenset[int]) -> None:
        """resident: addresses of storages that stay on the device."""
        self._offload = offload
        self._resident = resident
        self._known: dict[tuple[int, int], tuple[StorageReference, weakref.ref[_HostStorage]]] = {}
        self._order: list[weakref.ref[_HostStorage]] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what the graph stores instead of a tensor."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        plain = not (tensor.is_conj() or tensor.is_neg())
        if storage.nbytes() < LEAST or storage.data_ptr() in self._resident or not plain:
            return tensor
        key = storage.data_ptr(), get_write_count(tensor)
        reference, known = self._known.get(key, (None, None))
        found = None if known is None else known()
        if found is None or reference is None or not reference.is_of(storage):
            found = self._save(tensor, storage)
            self._known[key] = StorageReference(storage), self._order[-1]
        found.uses += 1
        return _SavedView(found, tensor)

    def _save(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _HostStorage:
        self._offload.storages += 1
        self._offload.bytes += storage.nbytes()
        self._offload.largest = max(self._offload.largest, storage.nbytes())
        copies = self._offload.copies(tensor.device)
        made = _HostStorage(self, len(self._order), copies, tensor, storage)
        self._order.append(weakref.ref(made))
        copies.release_oldest(AHEAD * self._offload.largest)
        return made

    def fetch_before(self, place: int) -> None:
        """Start the copies of the storages that were saved before this one."""
        free = AHEAD * self._offload.largest
        for reference in reversed(self._order[:place]):
            found = reference()
            if found is not None and found.uses > 0:
                free -= found.size
                if free < 0:
                    return
                found.start()


class _HostStorage:
    """One storage on the host. uses: how many saved tensors of it the backward has not read."""

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_copies",
        "_device",
        "_host",
        "_place",
        "_record",
        "uses",
    )

    def __init__(
        self,
        record: MicrobatchActivations,
        place: int,
        copies: _DeviceCopies,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
    ) -> None:
        self.uses = 0
        self._record, self._place, self._copies = record, place, copies
        self._device: torch.Tensor | None = None
        self._arrived: Any = None
        line = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        line.set_(storage, 0, (storage.nbytes(),), (1,))
        self._host = copies.send(line, tensor.detach(), self)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._host.nbytes

    def __del__(self) -> None:
        """Let the computation wait for a copy that nothing has read, before it uses its memory."""
        self._copies.wait(self._arrived)

    def keep(self, line: torch.Tensor | None) -> None:
        """Use the storage itself while it is on the device; None: it is no longer."""
        if self._arrived is None:
            self._device = line

    def start(self) -> None:
        """Start the copy to the device, unless it is there."""
        if self._device is None:
            self._device, self._arrived = self._copies.bring(self._host)

    def read(self) -> torch.Tensor:
        """Return the bytes on the device, and start the copies of those that follow."""
        self.start()
        line = self._device
        assert line is not None, "the copy has started"
        self._copies.wait(self._arrived)
        self._arrived = None
        self.uses -= 1
        if self.uses <= 0:
            self._device = None
        self._record.fetch_before(self._place)
        return line


class _SavedView:
    """A saved tensor as a view of a storage on the host."""

    __slots__ = ("_dtype", "_layout", "_storage")

    def __init__(self, storage: _HostStorage, tensor: torch.Tensor) -> None:
        self._storage, self._dtype = storage, tensor.dtype
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()

    def read(self) -> torch.Tensor:
        """Return the tensor on the device."""
        line = self._storage.read()
        made = torch.empty(0, dtype=self._dtype, device=line.device)
        return made.set_(line.untyped_storage(), *self._layout)


def _unpack(kept: Any) -> torch.Tensor:
    found: torch.Tensor = kept.read() if isinstance(kept, _SavedView) else kept
    return found


class _PendingCopy(NamedTuple):
    """A tensor whose storage is being copied to the host: the event after the copy, its writes."""

    copied: Any
    tensor: torch.Tensor
    writes: int
    owner: weakref.ref[_HostStorage]


class _DeviceCopies:
    """Copies between a device and the host beside the device's computation.

    On a CPU the copies are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = get_device_module(device) if is_accelerator(device) else None
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        self._leaving: deque[_PendingCopy] = deque()

    def send(self, line: torch.Tensor, tensor: torch.Tensor, owner: _HostStorage) -> torch.Tensor:
        """Return host memory into which the bytes are copied; they stay on the device meanwhile."""
        if self._module is None:
            return line.clone()
        host = allocate_pinned(line, torch.contiguous_format)
        with self._copying():
            host.copy_(line, non_blocking=True)
            copied = self._stream.record_event()
        owner.keep(line)
        self._leaving.append(
            _PendingCopy(copied, tensor, get_write_count(tensor), weakref.ref(owner))
        )
        return host

    def release_oldest(self, most: int) -> None:
        """Release the oldest storages, so that at most so many bytes wait for their copies."""
        waiting = sum(each.tensor.untyped_storage().nbytes() for each in self._leaving)
        while waiting > most:
            oldest = self._leaving.popleft()
            waiting -= oldest.tensor.untyped_storage().nbytes()
            self._release(*oldest)

    def bring(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return device memory into which the bytes are copied, and the event after the copy."""
        if self._module is None:
            return host.clone(), None
        line = torch.empty(host.numel(), dtype=host.dtype, device=self._device)
        with self._copying():
            line.copy_(host, non_blocking=True)
            return line, self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the computation wait for a copy. None: there is nothing to wait for."""
        if event is not None and self._module is not None:
            self._module.current_stream(self._device).wait_event(event)

    def release_unused(self) -> None:
        """Release the storages of which the backward has read all tensors."""
        needed, unused = deque[_PendingCopy](), list[_PendingCopy]()
        for leaving in self._leaving:
            owner = leaving.owner()
            (unused if owner is None or owner.uses <= 0 else needed).append(leaving)
        self._leaving = needed
        for leaving in unused:
            self._release(*leaving)

    def _release(
        self, copied: Any, tensor: torch.Tensor, writes: int, reference: weakref.ref[_HostStorage]
    ) -> None:
        """Release a storage, whose memory the computation may then use for other tensors."""
        self.wait(copied)
        owner = reference()
        if owner is not None:
            owner.keep(None)
        if get_write_count(tensor) != writes:
            raise error(
                "FXP109",
                where="offload of activations",
                why=f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified "
                "in place after the forward used it",
                fix='do not modify it in place, or use offload="none"',
            )

    def _copying(self) -> AbstractContextManager[Any]:
        """Return the context of copies that follow what the device computes so far."""
        if self._module is None:
            return nullcontext()
        self._stream.wait_stream(self._module.current_stream(self._device))
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context


def _get_addresses(values: Iterable[Any]) -> frozenset[int]:
    """Return the addresses of the tensors' storages."""
    return frozenset(
        value.untyped_storage().data_ptr()
        for value in values
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    )
