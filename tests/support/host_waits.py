"""Places where a training step on a GPU would make the host wait for the device, found on a CPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from fxpart.compat import TorchDispatchMode
from fxpart.runtime.torch_modes import TorchModes

# Ops whose result, or its size, the host must know.
_READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "repeat_interleave", "bincount", "allclose",
}  # fmt: skip
_COPIES = ("cpu", "tolist", "numpy", "__array__")  # methods of tensors that copy to the host
_MAKERS = ("tensor", "as_tensor")  # with a device, they copy from pageable memory and wait


class HostWaits(TorchDispatchMode):
    """Records each read of a value that would be in the memory of a device.

    These are the tensors given at the start, such as parameters and batches, and all results that
    are computed from them. waits: where each read happens.
    """

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.waits: list[str] = []
        # The storages are held, so that no other gets the address of one that is gone.
        self._held: dict[int, torch.UntypedStorage] = {}
        self._add(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op; record it if it reads, and its results."""
        known = self._knows((args, kwargs))
        if known and func._schema.name.split("::")[1] in _READS:
            self._record(str(func))
        result = func(*args, **(kwargs or {}))
        if known:
            self._add(result)
        return result

    @contextmanager
    def watch(self) -> Iterator[HostWaits]:
        """Record in the context, also the methods that copy to the host.

        A trainer refuses modes of others; it accepts this one.
        """
        patches = [mock.patch.object(torch.Tensor, name, self._wrap(name)) for name in _COPIES]
        patches += [mock.patch.object(torch, name, self._wrap_maker(name)) for name in _MAKERS]
        patches.append(mock.patch.object(TorchModes, "enter", lambda *_: None))
        for patch in patches:
            patch.start()
        try:
            with self:
                yield self
        finally:
            for patch in patches:
                patch.stop()

    def _wrap(self, name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._knows(tensor):
                return original(tensor, *args, **kwargs)
            self._record(name)
            # A copy, which is in the memory of the host from now on.
            with torch.utils._python_dispatch._disable_current_modes():
                return original(tensor.clone(), *args, **kwargs)

        return method

    def _wrap_maker(self, name: str) -> Any:
        original = getattr(torch, name)

        def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = original(data, *args, **kwargs)
            if kwargs.get("device") is not None:
                self._record(name)
                self._add(result)
            return result

        return make

    def _record(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/fxpart/" in f.filename]
        place = f"{frames[-1].filename.split('/fxpart/')[-1]}:{frames[-1].lineno}" if frames else ""
        self.waits.append(f"{what} {place}")

    def _add(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._held.setdefault(storage._cdata, storage)

    def _knows(self, tensors: Any) -> bool:
        return any(
            isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in self._held
            for x in tree_leaves(tensors)
        )
