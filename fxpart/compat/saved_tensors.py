"""Saved tensors of autograd nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_PREFIX = "_raw_saved_"
_SLOTS: dict[type, tuple[str, ...]] = {}  # of each kind of node, found once


def saved_slots(node: Any) -> tuple[str, ...]:
    """Return the attributes in which a node saves tensors (``_raw_saved_*``); equal for its type.

    They are described in torch's notes on autograd, under hooks for saved tensors.
    """
    kind = type(node)
    if kind not in _SLOTS:
        _SLOTS[kind] = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    return _SLOTS[kind]


def release_saved(node: Any, slots: tuple[str, ...]) -> None:
    """Release the tensors that a node saves in these attributes; it cannot run again.

    Tensors packed by hooks, and None, are unchanged.
    """
    for slot in slots:
        kept = getattr(node, slot)
        for one in kept if isinstance(kept, tuple) else (kept,):
            try:
                one.register_hooks(_nothing, _gone)
            except (
                RuntimeError,
                AttributeError,
            ):  # packed by other hooks, None, or already released
                continue


def saved_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the innermost (pack, unpack) saved-tensor hooks; None if there are none.

    torch calls only the innermost hooks; hooks that leave a tensor to outer ones call these
    (``_top_saved_tensors_default_hooks``).
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return cast("tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None", found)


class StorageReference:
    """A weak reference to a storage (``torch.multiprocessing.reductions.StorageWeakRef``)."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Refer to the storage without keeping its memory."""
        self._reference = StorageWeakRef(storage)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether it refers to this storage, not to a freed one at its address."""
        return self._reference.cdata == storage._cdata and not self._reference.expired()


def is_watched(leaf: torch.Tensor) -> bool:
    """Return whether hooks see the gradient of a leaf (``_backward_hooks`` and the like)."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _nothing(tensor: object) -> None:
    """Return None in place of a tensor."""


def _gone(packed: object) -> NoReturn:
    raise RuntimeError("a saved tensor was dropped between the halves of a backward")
