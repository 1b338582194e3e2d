"""Values of the buffers that forward passes write, to restore them if their update is rejected."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxpart.compat import get_write_count, set_write_count


class WrittenBuffers:
    """Buffers of this process that forward passes write, and their stored values."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Create a store for these tensors, whose memory it takes with the first values."""
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._copies: list[torch.Tensor] = []

    def store(self) -> None:
        """Store the values; called between two steps."""
        if not self._copies:
            self._copies = [torch.empty_like(tensor) for tensor in self.tensors]
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            copy.copy_(tensor.detach())

    def restore(self) -> None:
        """Return to the stored values."""
        with torch.no_grad():
            for tensor, copy in zip(self.tensors, self._copies, strict=True):
                tensor.copy_(copy)

    def store_finite(self) -> None:
        """Store the values of buffers that are finite; the host does not wait for a device."""
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            finite = torch.isfinite(tensor).all()
            copy.copy_(torch.where(finite, tensor.detach(), copy))

    def restore_finite(self) -> None:
        """Return buffers that are not finite to stored values that are.

        Backwards of later minibatches may have saved them, such as that of batch normalization,
        which does not read them; a write that autograd counted would end these.
        """
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            if not _is_finite(tensor) and _is_finite(copy):
                tensor.data.copy_(copy)


class StepState(WrittenBuffers):
    """Buffers that each microbatch of a step writes from their values before the step."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Create a store for these tensors."""
        super().__init__(tensors)
        self._step: object = None
        self._counts: list[int] = []

    def begin_microbatch(self, step: object) -> None:
        """Store the values before the first microbatch of a step; return to them before others."""
        if not self.tensors or step is None:
            return
        if step is not self._step:
            self._step = step
            self._counts = [get_write_count(tensor) for tensor in self.tensors]
            self.store()
            return
        # Graphs of earlier microbatches may have saved the values that are written once more.
        for tensor, copy, count in zip(self.tensors, self._copies, self._counts, strict=True):
            tensor.data.copy_(copy)
            set_write_count(tensor, count)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
