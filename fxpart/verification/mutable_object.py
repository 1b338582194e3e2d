"""Mutable objects that code reaches, with copies of their content to find what changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch

from fxpart.capture.python_state import in_slot, slots_of_object
from fxpart.environment import get_variables
from fxpart.verification.object_values import ATOMS

MISSING = object()
_INTERNAL = frozenset(
    (
        "_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set",
        "_version", "__builtins__",
    )
)  # fmt: skip


@dataclass(frozen=True)
class StateChange:
    """One value that changed. path: for messages. key: the name that code uses for it.

    kind: "number" (a Python number, string or None), "tensor", "size" (of a container), "random"
    (the state of a random generator), "iterator" or "object". grown: for sizes, whether the
    container has more elements than before.
    """

    path: str
    key: str
    kind: str
    grown: bool = False


@dataclass
class MutableObject:
    """A mutable object and a copy of its content.

    read: returns its content by key. restore: restores the copied content. name: the name that code
    uses for it.
    """

    owner: Any
    path: str
    name: str
    content: dict[Any, Any]
    read: Callable[[], dict[Any, Any]]
    restore: Callable[[], None]
    sized: bool = False

    @property
    def is_scope(self) -> bool:
        """Whether it contains variables that code uses: globals and closures."""
        if self.owner is get_variables():
            return True
        return isinstance(self.owner, CellType) or (type(self.owner) is dict and not self.sized)

    def shown(self, key: Any) -> str:
        """Return the path of an element, for messages."""
        return f"{self.path}[{key!r:.40}]" if self.sized else _joined(self.path, str(key))

    def reader(self, key: Any) -> Callable[[], Any]:
        """Return a fast function that reads the current element."""
        owner = self.owner
        if isinstance(owner, CellType):
            return lambda: owner.cell_contents
        space = owner if self.is_scope else getattr(owner, "__dict__", None)
        if type(space) is dict and not self.sized:
            return lambda: space.get(key, MISSING)
        if isinstance(owner, dict):
            return lambda: owner.get(key, MISSING)
        if isinstance(owner, (list, deque)):
            return lambda: owner[key] if key < len(owner) else MISSING
        if isinstance(owner, type):
            return lambda: getattr(owner, key, MISSING)
        if key in (slots := slots_of_object(owner)):
            slot = slots[key][0]
            return lambda: in_slot(owner, slot)
        if isinstance(owner, ContextVar):
            return lambda: get_context_value(owner)
        if owner is get_variables():
            return lambda: get_variables().get(key, MISSING)
        read = self.read
        return lambda: read().get(key, MISSING)


def find_differences(holder: MutableObject) -> Iterator[StateChange]:
    """Yield what differs from the copied content."""
    now = holder.read()
    if holder.sized and len(now) != len(holder.content):
        yield StateChange(holder.path, holder.name, "size", grown=len(now) > len(holder.content))
        return
    for key in dict.fromkeys((*holder.content, *now)):
        before, after = holder.content.get(key, MISSING), now.get(key, MISSING)
        if before is after or key in _INTERNAL:
            continue
        own = isinstance(holder.owner, (list, deque, set, dict, bytearray)) and holder.sized
        path = f"{holder.path}[{key!r:.40}]" if own else _joined(holder.path, str(key))
        name = holder.name if own else str(key)
        if isinstance(before, ATOMS) and isinstance(after, ATOMS):
            if type(before) is not type(after) or before != after:
                yield StateChange(path, name, "number")
        elif isinstance(after, torch.Tensor) or isinstance(before, torch.Tensor):
            yield StateChange(path, name, "tensor")
        else:
            yield StateChange(path, name, "object")


def _joined(path: str, name: str) -> str:
    return path + name if path.endswith((" ", ".")) else join_path(path, name)


def get_context_value(variable: ContextVar[Any]) -> Any:
    """Return the value of a context variable, MISSING without one."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def join_path(path: str, name: str) -> str:
    """Return the path of an attribute, for messages."""
    return f"{path}.{name}" if path else name
