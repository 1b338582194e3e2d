"""What an op takes while it runs, beside operands and results: seen on fake tensors, op by op.

Composite ops show their parts (the log-softmax of a cross entropy and its gradient). What a kernel
takes inside itself is not seen, but for convolutions, where it is large and follows a rule.
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
    """Bytes that an op takes while it runs.

    forward: at most, beside operands and what is left (results, saved tensors). backward: at most,
    with the gradients that it makes, beside what was saved and the gradients that it is given.
    through: the operand tensors, by index, whose gradient is that of a result, not a new one.
    """

    forward: Size = 0
    backward: Size = 0
    through: tuple[int, ...] = ()


class PeakMemoryMode(TorchDispatchMode):
    """Follows the storages that ops make while it is on."""

    def __init__(self) -> None:
        """Nothing made yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], Size, int]] = {}
        self._old: dict[int, torch.UntypedStorage] = {}
        self._now = self._most = 0
        self._peak: tuple[Size, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count what is new among its results."""
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
        """Bytes of what was made and lived at once, at most."""
        return _sum(self._peak)

    def beside(self) -> Size:
        """The peak less what lives now; 0 where that is the peak."""
        if self._now >= self._most:
            return 0
        return self.peak() - _sum(tuple(size for _, size, _ in self._live.values()))


def backward_working(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> tuple[Size, tuple[int, ...]]:
    """Run the backward of fake results: its peak, and operands whose gradient is a result's own.

    An op without one, or one that fake tensors cannot run, takes what its operands' gradients do.
    """
    ends = [t for t in outputs if t.requires_grad]
    wanted = [(i, t) for i, t in enumerate(inputs) if t.requires_grad]
    if not ends or not wanted:
        return 0, ()
    given = [torch.empty_like(t, requires_grad=False) for t in ends]
    homes = {id(t.untyped_storage()) for t in given}
    watch = PeakMemoryMode()
    try:
        with watch, silence_fake_errors():
            found = torch.autograd.grad(ends, [t for _, t in wanted], given, allow_unused=True)
    except (RuntimeError, NotImplementedError, TypeError):
        return _sum(tuple(expression(nbytes(t)) for _, t in wanted)), ()
    through = tuple(
        index
        for (index, _), gradient in zip(wanted, found, strict=True)
        if gradient is not None and id(gradient.untyped_storage()) in homes
    )
    return watch.peak(), through


def convolution(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> tuple[Size, Size]:
    """What oneDNN's convolutions take at most: copies in layouts of eight channels at a time.

    Forward: one of each operand and result. Backward: two, and four of the weight, the gradients
    being among them. Measured, not derived: equal for small ones, up to 1.4 times too much above.
    """
    x, weight, *_ = inputs
    values = _sum(tuple(_padded(t, (1,)) for t in (x, *outputs)))
    kernel = _padded(weight, (0, 1))
    return values + kernel, 2 * values + 4 * kernel


def _padded(tensor: torch.Tensor, dims: tuple[int, ...]) -> Size:
    """Bytes with these dims rounded up to a multiple of eight."""
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
