"""Values of the buffers that forward passes write, to restore them if their update is rejected."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_SMALL = 1 << 16  # maximum elements of a buffer whose copy is always kept


class WrittenBuffers:
    """Buffers of this process that training steps write, and their stored values.

    A program writes the same buffers in every step. The first :meth:`store` copies all of them;
    whatever comes after the first step keeps only the copies of small ones, and of those that it
    has changed. Small ones may be written without a change, such as the mean of zeros.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Create an empty store for these tensors."""
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._constant: list[tuple[torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def store(self) -> None:
        """Store the values; called between two steps."""
        if any(tensor._version != version for tensor, version in self._constant):
            self._constant, self._copies, self._pairs = [], [], None  # such as loaded values
        if not self._copies and self._pairs is None:
            self._copies = [(t, t._version, t.detach().clone()) for t in self._tensors]
            return
        for tensor, copy in self._find_written():
            copy.copy_(tensor.detach())

    def restore(self) -> None:
        """Return to the stored values."""
        with torch.no_grad():
            for tensor, copy in self._find_written():
                tensor.copy_(copy)

    def store_finite(self) -> None:
        """Store the values of buffers that are finite; the host does not wait for a device."""
        for tensor, copy in self._find_written():
            finite = torch.isfinite(tensor).all()
            copy.copy_(torch.where(finite, tensor.detach(), copy))

    def restore_finite(self) -> None:
        """Return buffers that are not finite to stored values that are.

        Backwards of later minibatches may have saved them, such as that of batch normalization,
        which does not read them; a write that autograd counted would end these.
        """
        for tensor, copy in self._find_written():
            if not _is_finite(tensor) and _is_finite(copy):
                tensor.data.copy_(copy)

    def _find_written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the buffers that were written since the first copy, with their stored values.

        Values are compared, too: the replay of a CUDA graph does not count as a write of a tensor.
        """
        if self._pairs is None:
            self._pairs = []
            for tensor, version, copy in self._copies:
                large = tensor.numel() > _SMALL
                if large and tensor._version == version and torch.equal(tensor, copy):
                    self._constant.append((tensor, version))
                else:
                    self._pairs.append((tensor, copy))
            self._copies = []
        return self._pairs


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
