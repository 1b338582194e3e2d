"""Temporary memory of ops beyond operands and results, observed on fake tensors.

Composite ops show their parts, such as the log-softmax of a cross entropy. Memory that a kernel
allocates internally is not visible, except for convolutions, where a rule estimates it.
"""

from __future__ import annotations

import weakref
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


class PeakMemoryMode(TorchDispatchMode):
    """Dispatch mode that tracks the storages that ops allocate."""

    def __init__(self) -> None:
        """Start with no tracked storage."""
        super().__init__()  # type: ignore[no-untyped-call]
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
        if self._now > self._most:
            self._most = self._now
            self._peak = tuple(held for _, held, _ in self._live.values())

    def peak(self) -> Size:
        """Return the peak bytes of tracked storages."""
        return _sum(self._peak)

    def beside(self) -> Size:
        """Return the peak minus the bytes alive now; 0 if the current state is the peak."""
        if self._now >= self._most:
            return 0
        return self.peak() - _sum(tuple(size for _, size, _ in self._live.values()))


def backward_working(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> tuple[Size, tuple[int, ...]]:
    """Run the backward on fake tensors; return its peak and the operands with aliased gradients.

    An op whose backward cannot run on fake tensors is charged the bytes of its operands' gradients.
    """
    ends = [t for t in outputs if t.requires_grad]
    wanted = [(i, t) for i, t in enumerate(inputs) if t.requires_grad]
    if not ends or not wanted:
        return 0, ()
    grads = [torch.empty_like(t, requires_grad=False) for t in ends]
    homes = {id(t.untyped_storage()) for t in grads}
    watch = PeakMemoryMode()
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
