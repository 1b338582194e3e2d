"""What a node of the autograd graph has saved for its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch

_PREFIX = "_raw_saved_"
_SLOTS: dict[type, tuple[str, ...]] = {}  # of each kind of node, found once


def saved_slots(node: Any) -> tuple[str, ...]:
    """The attributes under which a node keeps tensors (``_raw_saved_*``), the same for its kind.

    They are described in torch's notes on autograd, under hooks for saved tensors. Empty where
    there are none.
    """
    kind = type(node)
    if kind not in _SLOTS:
        _SLOTS[kind] = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    return _SLOTS[kind]


def release_saved(node: Any, slots: tuple[str, ...]) -> None:
    """Drop the tensors that a node keeps under these attributes; it cannot run again.

    A tensor that hooks have packed, and none, are left as they are.
    """
    for slot in slots:
        kept = getattr(node, slot)
        for one in kept if isinstance(kept, tuple) else (kept,):
            try:
                one.register_hooks(_nothing, _gone)
            except (RuntimeError, AttributeError):  # packed by others, None, or given back already
                continue


def saved_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The (pack, unpack) that are asked for what autograd saves now, without the hooks around them.

    torch calls the innermost alone; hooks that leave a tensor to those around them call these
    (``_top_saved_tensors_default_hooks``). None where there are none.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return cast("tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None", found)


def _nothing(tensor: object) -> None:
    """What is kept in the place of a tensor."""


def _gone(packed: object) -> NoReturn:
    raise RuntimeError("a saved tensor was dropped between the halves of a backward")
