"""Temporary memory of ops beyond operands and results, observed on fake tensors.

Composite ops show their parts, such as the log-softmax of a cross entropy. Memory that a kernel
allocates internally is not visible, except for convolutions, where a rule estimates it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.compat import silence_fake_errors
from fxpart.compiler.kernel_memory import Size
from fxpart.compiler.tensor_sizes import expression, hint, nbytes, tensors


@dataclass(frozen=True)
class MeasuredWorkspace:
    """Temporary bytes of an op.

    forward: peak bytes beyond operands, results and saved tensors. backward: peak bytes including
    the gradients that it computes, beyond saved tensors and incoming gradients. through: indices of
    operand tensors whose gradient aliases the gradient of a result.
    """

    forward: Size = 0
    backward: Size = 0
    through: tuple[int, ...] = ()


class SavedTensors:
    """The tensors that autograd saves of one call; ``pack`` and ``unpack`` are its hooks.

    tensors: all of them, in order.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.tensors: list[torch.Tensor] = []
        self._handles: list[weakref.ref[_Handle]] = []

    def pack(self, tensor: torch.Tensor) -> _Handle:
        """Record a tensor; its handle lives as long as autograd stores it."""
        handle = _Handle(tensor)
        self.tensors.append(tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    @staticmethod
    def unpack(handle: _Handle) -> torch.Tensor:
        """Return the tensor."""
        return handle.tensor

    def clear(self) -> None:
        """Forget all of them."""
        self.tensors.clear()
        self._handles.clear()

    def freed(self, others: list[torch.Tensor]) -> list[Size]:
        """Return the bytes of each storage that a backward has freed; not those of ``others``."""
        kept = {id(t.untyped_storage()) for t in others}
        pairs = list(zip(self.tensors, self._handles, strict=True))
        kept |= {id(t.untyped_storage()) for t, handle in pairs if handle() is not None}
        found = {id(t.untyped_storage()): nbytes(t) for t in self.tensors}
        return [size for key, size in found.items() if key not in kept]


@dataclass(eq=False)
class _Handle:
    tensor: torch.Tensor


class PeakMemoryMode(TorchDispatchMode):
    """Dispatch mode that tracks the storages that ops allocate."""

    def __init__(self, freed: Callable[[], list[Any]] = list) -> None:
        """Start with no tracked storage. freed: bytes of each untracked storage freed so far."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._freed = freed
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], Size, int]] = {}
        self._old: dict[int, torch.UntypedStorage] = {}
        self._now = self._most = 0
        self._peak: tuple[Size, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count newly allocated results."""
        for tensor in tensors([*args, *(kwargs or {}).values()]):
            storage = tensor.untyped_storage()
            if id(storage) not in self._live:
                self._old[id(storage)] = storage
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._old:
            return
        size, number = expression(nbytes(tensor)), hint(nbytes(tensor))

        def freed(_: object) -> None:
            del self._live[key]
            self._now -= number

        self._live[key] = weakref.ref(storage, freed), size, number
        self._now += number
        less = self._freed()
        now = self._now - sum(map(hint, less))
        if now > self._most:
            self._most = now
            self._peak = (
                *(held for _, held, _ in self._live.values()),
                *(-1 * expression(size) for size in less),
            )

    def peak(self) -> Size:
        """Return the peak bytes of tracked storages."""
        return _sum(self._peak)

    def beside(self) -> Size:
        """Return the peak minus the bytes alive now; 0 if the current state is the peak."""
        if self._now >= self._most:
            return 0
        return self.peak() - _sum(tuple(size for _, size, _ in self._live.values()))


def backward_working(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor], saved: SavedTensors
) -> tuple[Size, tuple[int, ...]]:
    """Run the backward on fake tensors; return its peak and the operands with aliased gradients.

    saved: those of the forward, of which a composite op frees some before its backward ends.
    An op whose backward cannot run on fake tensors is charged the bytes of its operands' gradients.
    """
    ends = [t for t in outputs if t.requires_grad]
    wanted = [(i, t) for i, t in enumerate(inputs) if t.requires_grad]
    if not ends or not wanted:
        return 0, ()
    grads = [torch.empty_like(t, requires_grad=False) for t in ends]
    homes = {id(t.untyped_storage()) for t in grads}
    watch = PeakMemoryMode(lambda: saved.freed([*inputs, *outputs]))
    try:
        with watch, silence_fake_errors():
            found = torch.autograd.grad(ends, [t for _, t in wanted], grads, allow_unused=True)
    except (RuntimeError, NotImplementedError, TypeError):
        return _sum(tuple(expression(nbytes(t)) for _, t in wanted)), ()
    through = tuple(
        index
        for (index, _), gradient in zip(wanted, found, strict=True)
        if gradient is not None and id(gradient.untyped_storage()) in homes
    )
    return watch.peak(), through


def convolution(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> tuple[Size, Size]:
    """Return the peak temporary bytes of a oneDNN convolution, forward and backward.

    oneDNN copies tensors into layouts with blocks of eight channels. Forward: one copy of each
    operand and result. Backward: two copies, and four of the weight, including the gradients. These
    factors are measured: exact for small convolutions, up to 1.4 times too large for others.
    """
    x, weight, *_ = inputs
    values = _sum(tuple(_padded(t, (1,)) for t in (x, *outputs)))
    kernel = _padded(weight, (0, 1))
    return values + kernel, 2 * values + 4 * kernel


def _padded(tensor: torch.Tensor, dims: tuple[int, ...]) -> Size:
    """Return the bytes with these dims rounded up to a multiple of eight."""
    size: Size = tensor.element_size()
    for dim, length in enumerate(tensor.shape):
        known = expression(length)
        size = size * (-(-known // 8) * 8 if dim in dims and isinstance(known, int) else known)
    return size


def _sum(sizes: tuple[Size, ...]) -> Size:
    total: Size = 0
    for size in sizes:
        total = total + size
    return total
