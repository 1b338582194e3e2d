"""Masks that forward computes more than once, so that their rows have one number.

``predicted[target > 0]`` and ``target[target > 0]`` have equally many rows, which a tracer does not
know: to it, each mask has a number of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxpart.compat import share_number_of_rows

_SELECTIONS = frozenset(
    {torch.Tensor.__getitem__, torch.masked_select, torch.Tensor.masked_select, torch.nonzero,
     torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.where}
)  # fmt: skip


class EqualMasks(TorchFunctionMode):
    """Gives masks from equal calls on the same tensors, unchanged since, one number of rows."""

    def __init__(self) -> None:
        """Start without masks."""
        super().__init__()
        self._first: dict[Any, tuple[torch.Tensor, Any]] = {}  # with what must stay alive
        self._equal: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: itself, the first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        masks = list(self._masks(args)) if func in _SELECTIONS else []
        for mask, first in masks:
            share_number_of_rows(first, mask)
        found = func(*args, **kwargs)
        for mask, first in masks:
            share_number_of_rows(mask, first)
        if isinstance(found, torch.Tensor) and found.dtype is torch.bool:
            key = self._key(func, args, kwargs)
            if key is not None:
                first, _ = self._first.setdefault(key, (found, (args, kwargs)))
                self._equal[id(found)] = found, first
        return found

    def _masks(self, args: Any) -> Any:
        """Yield each mask among arguments with the first that is equal."""
        for each in args:
            if isinstance(each, torch.Tensor) and id(each) in self._equal:
                yield self._equal[id(each)]
            elif isinstance(each, tuple | list):
                yield from self._masks(each)

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what tells equal calls; None for a call that is never taken as equal."""
        key: list[Any] = [func]
        for each in (*args, *kwargs.items()):
            if isinstance(each, torch.Tensor):
                _, first = self._equal.get(id(each), (each, each))
                key += [id(first), each._version, first._version]
            elif each is None or isinstance(each, bool | int | float | str | torch.dtype):
                key.append((type(each), each))
            else:
                return None
        return tuple(key)
