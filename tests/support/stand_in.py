"""A stand-in accelerator: a device of torch whose tensors live in CPU memory behind them.

``register()`` makes it torch's backend for other devices ("privateuse1"), for the whole process.
Every op runs as the CPU's op on the memory behind the tensors, so results equal the CPU's. As on
CUDA, an op that mixes the device and the CPU fails, random ops draw from the device's generator,
the backward runs in the device's thread, and a copy to pinned memory that does not block is
written when the host waits for the device.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_META_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
# The CPU's kernels of these change sizes and strides alone.
_VIEWS = ("as_strided", "set_", "view", "_reshape_alias", "unfold")
_OWN = ("copy_", "_copy_from", "_local_scalar_dense", "is_pinned", "_pin_memory")
# CUDA accepts a CPU tensor without dims as their value, and CPU tensors as their indices.
_TAKE_SCALARS = ("aten::index_put_", "aten::_index_put_impl_", "aten::masked_fill_")
_TAKE_INDICES = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
_INDICES = (torch.long, torch.int, torch.bool, torch.uint8)
_LOCK = threading.RLock()


class Memory:
    """Bytes of the device's live storages, and their maximum."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        self.now += (size := storage.nbytes())
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


class Host:
    """What the host did. waits: reads of the device that block; late: copies not yet written."""

    def __init__(self) -> None:
        self.waits = self.copies = 0
        self._late: list[Callable[[], object]] = []

    def wait(self) -> None:
        """Wait for the device: copies that did not block are written."""
        self.waits += 1
        self.write()

    def write(self) -> None:
        """Write the copies that did not block."""
        with _LOCK:
            late, self._late = self._late, []
        for write in late:
            write()

    def write_later(self, write: Callable[[], object]) -> None:
        """Register a copy that does not block."""
        self.copies += 1
        with _LOCK:
            self._late.append(write)


memory, host, generator = Memory(), Host(), torch.Generator()


class Event:
    """An event of a stream. stream: whose copies it waits for; None: of the computation."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed, self.at = enable_timing, 0.0
        self.stream: Stream | None = None

    def record(self) -> None:
        """Note the time."""
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the device."""
        host.wait()

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds."""
        assert self.timed and other.timed
        return 1e3 * (other.at - self.at)


class Stream:
    """A stream that copies without blocking. The computation's stream runs ops at once.

    Copies to the device are written when the computation waits for one of their events, and those
    to pinned memory when the stream reads it, or when the host waits.
    """

    def __init__(self, device: object = None, *, own: bool = True) -> None:
        self.own, self.arriving = own, list[Callable[[], object]]()

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: what the computation has enqueued has run."""
        assert self.own and not other.own

    def record_event(self) -> Event:
        """Return an event after the copies so far."""
        event = Event()
        event.stream = self
        return event

    def wait_event(self, event: Event) -> None:
        """Let the computation read what the stream has copied."""
        assert not self.own and event.stream is not None
        with _LOCK:
            arriving, event.stream.arriving = event.stream.arriving, []
        for write in arriving:
            write()


class Module(ModuleType):
    """The device's module, ``torch.standin``: what is used of ``torch.cuda``."""

    Event, Stream = Event, Stream

    def current_stream(self, device: object = None) -> Stream:
        return _computing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        _here.stream = stream
        try:
            yield
        finally:
            _here.stream = _computing

    default_generators = (generator,)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        assert device is not None

    def get_device_name(self, device: object = None) -> str:
        return "stand-in accelerator"

    def synchronize(self, device: object = None) -> None:
        host.wait()

    def manual_seed_all(self, seed: int) -> None:
        generator.manual_seed(seed)

    def get_rng_state(self, device: object = NAME) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = NAME) -> None:
        generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: object = None) -> int:
        return memory.now

    def max_memory_allocated(self, device: object = None) -> int:
        return memory.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        memory.peak = memory.now


def register() -> None:
    """Make the device known to torch, once per process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module(NAME))
    for name, op in _iterate_ops():
        base = op._schema.name[6:]
        if base not in _OWN:
            kernel = _make_view_kernel(op) if base in _VIEWS else _make_kernel(op)
            _library.impl(name, kernel, "PrivateUse1")
    _library.impl("aten::copy_", _copy, "PrivateUse1")
    _library.impl("aten::_copy_from", lambda x, to, late=False: _copy(to, x, late), "PrivateUse1")
    _library.impl("aten::_local_scalar_dense", _read, "PrivateUse1")
    # Autocast of the device: captured programs contain its conversions as ops.
    _fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # As on CUDA, modules keep tied weights when they move.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.UntypedStorage.__deepcopy__ = _deepcopy_storage  # type: ignore[method-assign]


def pin(like: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
    """Return an empty CPU tensor in memory that counts as pinned."""
    made = torch.empty_like(like, device="cpu", memory_format=form)
    made.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return made


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor behind a tensor of the device, in the same memory."""
    behind = tensor.untyped_storage().behind  # type: ignore[attr-defined]
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(behind, tensor.storage_offset(), tensor.size(), tensor.stride())


_computing, _here = Stream(own=False), threading.local()
_library = torch.library.Library("aten", "IMPL")
_fallbacks = torch.library.Library("_", "IMPL")
_deepcopy = torch.UntypedStorage.__deepcopy__


def _iterate_ops() -> Iterator[tuple[str, Any]]:
    """Yield the ops that have a kernel of their own on the CPU."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CPU"
        ):
            base, _, overload = name[6:].partition(".")
            packet = getattr(_ATEN, base, None)
            if (overload or "default") in (() if packet is None else packet.overloads()):
                yield name, getattr(packet, overload or "default")


def _make_view_kernel(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op.redispatch(_CPU_KEYS, *args, **kwargs)


def _make_kernel(op: Any) -> Callable[..., Any]:
    """Return the device's kernel of an op: the CPU's on the memory behind the tensors."""
    arguments, random = op._schema.arguments, torch.Tag.nondeterministic_seeded in op.tags
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    in_place = [r.alias_info is not None and r.alias_info.is_write for r in op._schema.returns]

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if any(t.untyped_storage().device.type == "meta" for t in tensors):  # torch's fake tensors
            return op.redispatch(_META_KEYS, *args, **kwargs)
        _check_devices(op, tensors)
        known = {}
        for storage in (t.untyped_storage() for t in tensors if _is_here(t)):
            known[storage.behind._cdata] = storage
        behind = [read(x) if _is_here(x) else _CPU if _is_place(x) else x for x in leaves]
        own, named = pytree.tree_unflatten(behind, spec)
        found = (_draw if random else _call)(op, own, named)
        for before, after in zip(leaves, behind, strict=True) if written else ():
            if _is_here(before) and before.shape != after.shape:
                _resize(before, after)
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        targets = iter([given[name] for name in written if name in given])
        results = found if isinstance(found, (tuple, list)) else (found,)
        made = [
            next(targets) if index < len(in_place) and in_place[index]
            else pytree.tree_map_only(torch.Tensor, lambda t: _wrap(t, known), result)
            for index, result in enumerate(results)
        ]  # fmt: skip
        return made if isinstance(found, list) else tuple(made) if results is found else made[0]

    return run


def _is_here(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _is_place(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == NAME


def _check_devices(op: Any, tensors: list[torch.Tensor]) -> None:
    """Raise as CUDA does if an op mixes the device and the CPU."""
    others, name = [t for t in tensors if not _is_here(t)], op._schema.name
    if torch.Tag.pointwise in op.tags or name in _TAKE_SCALARS:
        others = [t for t in others if t.dim()]
    if name in _TAKE_INDICES:
        others = [t for t in others if t.dtype not in _INDICES]
    if others:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and {others[0].device}! (in {op})"
        )


def _wrap(found: torch.Tensor, known: dict[int, Any]) -> torch.Tensor:
    """Return the device's tensor over a CPU tensor; known: the device's storages by the CPU's."""
    behind = found.untyped_storage()
    storage = known.get(behind._cdata)
    if storage is None:
        storage = known[behind._cdata] = _make_storage(behind)
    return _set(torch._C._acc.create_empty_tensor((0,), found.dtype), storage, found)


def _make_storage(behind: torch.UntypedStorage) -> Any:
    place = torch.device(NAME, 0)
    made = torch._C._construct_storage_from_data_pointer(behind.data_ptr(), place, behind.nbytes())
    made.behind = behind
    memory.add(made)
    return made


def _set(tensor: torch.Tensor, storage: Any, like: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _ATEN.set_.source_Storage_storage_offset.redispatch(
        _CPU_KEYS, tensor, storage, like.storage_offset(), like.size(), like.stride()
    )
    return found


def _resize(tensor: torch.Tensor, behind: torch.Tensor) -> None:
    """Give a tensor of the device the memory that an op allocated for its result."""
    _set(tensor, _make_storage(behind.untyped_storage()), behind)


def _call(op: Any, args: Any, kwargs: Any) -> Any:
    """Call the CPU's op; torch passes numbers in place of tensors to kernels in Python."""
    takes = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    given = [
        torch.tensor(arg) if tensor and isinstance(arg, int | float) else arg
        for arg, tensor in zip(args, takes, strict=False)
    ]
    return op(*given, **kwargs)


def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Run a random op with the state of the device's generator in the CPU's."""
    with _LOCK:
        before = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            return op(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _copy(to: torch.Tensor, source: torch.Tensor, late: bool = False) -> torch.Tensor:
    """Copy to, from or on the device."""
    given = read(source) if _is_here(source) else source
    pinned = not _is_here(source) and getattr(source.untyped_storage(), "pinned", False)
    stream = getattr(_here, "stream", _computing)
    if _is_here(to) and late and pinned and stream.own:
        stream.arriving.append(lambda: _bring(to, source))
    elif _is_here(to):
        read(to).copy_(given)
    elif late and getattr(to.untyped_storage(), "pinned", False):
        taken = given.clone()
        to.fill_(1)  # Not yet the values: a reader that does not wait finds these.
        host.write_later(lambda: to.copy_(taken))
    else:
        host.wait()
        to.copy_(given)
    return to


def _bring(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy from pinned memory after the copies to it, for which the host does not wait."""
    host.write()
    read(to).copy_(source)


def _read(tensor: torch.Tensor) -> Any:
    host.wait()
    return read(tensor).item()


def _deepcopy_storage(storage: Any, memo: dict[Any, Any]) -> Any:
    """Copy a storage of the device, for which torch has no allocator."""
    if storage.device.type != NAME:
        return _deepcopy(storage, memo)
    made = _make_storage(copy.copy(storage.behind).clone())
    return memo.setdefault(storage._cdata, made)
