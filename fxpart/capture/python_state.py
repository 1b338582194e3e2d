"""Python state that a run of the model may change, restored after the run.

A capture runs the user's forward several times, on fake tensors and under a tracer. Each run must
start from the same state: a flag, a cache or a hook of an earlier run would change the graph, and a
fake tensor in a cache would break the model.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpart.capture.source_locations import is_users
from fxpart.compat import is_fake

_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_MAPPINGS, list, set, deque)
_CACHE = type(functools.lru_cache(lambda: None))
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "fxpart", "numpy"}
_MOST = 100_000  # maximum number of recorded objects
_SMALL = 65_536  # maximum elements of a tensor whose value is copied
_LARGE = 10_000  # items; larger containers are not searched


@dataclass
class PythonState:
    """State that modules and functions can change without a tensor operation.

    This covers the class and attributes of every submodule; the content of containers and the
    attributes of the user's objects in them; global variables, closures and lru_caches that the
    code names; and the values of small tensors, which fake modes may really write (``n += 1``).
    Larger tensors are recorded by identity;
    :func:`fxpart.capture.context_managers.preserve_tensors` covers their values. Caches of
    functools are only cleared. seen keeps a reference to each object, so that its id stays unique.
    """

    seen: dict[int, Any] = field(default_factory=dict)
    kinds: set[type] = field(default_factory=set)
    classes: list[tuple[nn.Module, type]] = field(default_factory=list)
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    variables: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    slots: list[tuple[Any, types.MemberDescriptorType, Any]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, *roots: Any) -> PythonState:
        """Record the current state reachable from modules and functions; None is ignored."""
        state = cls()
        for root in roots:
            state._add(root)
        state.values = copy_tensors(t for t in state.tensors if t.numel() <= _SMALL)
        return state

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the recorded state after this context."""
        self._empty_caches()
        try:
            yield
        finally:
            self._restore()

    def _add(self, root: Any) -> None:
        """Record the state of an object and everything reachable from it."""
        waiting = [root]
        while waiting:
            item = waiting.pop()
            if item is None or id(item) in self.seen or isinstance(item, _PLAIN):
                continue
            if isinstance(item, torch.Tensor):
                self.seen[id(item)] = item
                self.tensors.append(item)
                continue
            if len(self.seen) > _MOST:
                break
            self.seen[id(item)] = item
            waiting += self._parts(item)

    def _parts(self, item: Any) -> Iterator[Any]:
        """Record one object; yield the objects to visit next."""
        if isinstance(item, nn.Module):
            yield from self._module(item)
        elif type(item) in _CONTAINERS:
            self.containers.append((item, item.copy()))
            yield from _members(item)
        elif type(item) in (tuple, frozenset):
            yield from _members(item)
        elif isinstance(item, _CACHE):
            self.caches.append(item)
            yield item.__wrapped__
        elif isinstance(item, (types.FunctionType, types.MethodType, functools.partial)):
            yield from self._callable(item)
        elif isinstance(item, (staticmethod, classmethod)):
            yield item.__func__
        elif isinstance(item, property):
            yield item.fget
        elif isinstance(item, type):
            yield from self._class(item)
        elif is_holder(type(item)) or not _is_library(type(item).__module__):
            if type(_own(item)) is dict:
                yield from self._attributes(_own(item))
            for slot, held in slots_of_object(item).values():
                self.slots.append((item, slot, held))
                yield held
            yield from self._class(type(item))

    def _module(self, module: nn.Module) -> Iterator[Any]:
        self.classes.append((module, type(module)))
        yield from self._attributes(vars(module))
        yield from self._class(type(module))

    def _attributes(self, held: dict[str, Any]) -> Iterator[Any]:
        self.attributes.append((held, dict(held)))
        yield from held.values()

    def _class(self, kind: type) -> Iterator[Any]:
        """Yield a user class's methods, whose globals may contain caches, and its containers."""
        for base in kind.__mro__:
            if base in self.kinds or _is_library(base.__module__):
                continue
            self.kinds.add(base)
            yield from (held for name, held in vars(base).items() if name != "__dict__")

    def _callable(self, item: Any) -> Iterator[Any]:
        if isinstance(item, functools.partial):
            yield from (item.func, item.args, item.keywords)
            return
        if isinstance(item, types.MethodType):
            yield from (item.__self__, item.__func__)
            return
        for cell in item.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # empty cell
                continue
            self.cells.append((cell, content))
            yield content
        if not _is_library(item.__module__) and is_users(item.__code__.co_filename):
            yield getattr(item, "__wrapped__", None)
            yield from self._globals(item.__code__, item.__globals__)

    def _globals(self, code: types.CodeType, scope: dict[str, Any]) -> Iterator[Any]:
        """Yield variables that the code names in its module, and in the user's modules it names."""
        scopes = [scope]
        for name in code.co_names:
            held = scope.get(name)
            # A name that is not an identifier is not the user's, such as "@pytest_ar" in pytest's
            # asserts.
            if isinstance(held, types.ModuleType) and name.isidentifier():
                scopes += [] if _is_library(held.__name__) else [vars(held)]
        for held in scopes:
            for name in code.co_names:
                if name in held and not isinstance(held[name], types.ModuleType):
                    self.variables.append((held, name, held[name]))
                    yield held[name]
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._globals(constant, scope)

    def _empty_caches(self) -> None:
        """Clear functools caches, which may contain results of another run."""
        for cache in self.caches:
            cache.cache_clear()

    def _restore(self) -> None:
        """Restore everything that has changed."""
        for module, kind in self.classes:
            if type(module) is not kind:
                module.__class__ = kind
        for held, content in self.attributes:
            if not _same(held, content):
                held.clear()
                held.update(content)
        for container, content in self.containers:
            _refill(container, content)
        for scope, name, value in self.variables:
            if scope.get(name) is not value:
                scope[name] = value
        for cell, value in self.cells:
            cell.cell_contents = value
        for item, slot, value in self.slots:
            put_in_slot(item, slot, value)
        restore_tensors(self.values)
        self._empty_caches()


_PLAIN = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size,
    types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip


def copy_tensors(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tensors with copies of their values; tensors without values are skipped."""
    with torch.no_grad():
        return [(t, t.detach().clone()) for t in tensors if _has_values(t)]


def restore_tensors(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write copied values back if they changed, since a tensor may be mapped from a file."""
    with torch.no_grad():
        for tensor, value in values:
            if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                tensor.data = value.clone()
            elif not torch.equal(tensor, value):
                tensor.copy_(value)


def _has_values(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout is torch.strided and not is_fake(tensor)


_HOLDER_MODULES = frozenset(("argparse", "collections", "optparse", "types"))


def is_holder(kind: type) -> bool:
    """Return whether a standard-library class holds the user's values, such as Namespace."""
    return kind.__module__ in _HOLDER_MODULES and kind.__name__ in (
        "Namespace", "SimpleNamespace", "Values", "UserDict", "UserList", "ChainMap",
    )  # fmt: skip


def slots_of_object(item: Any) -> dict[str, tuple[types.MemberDescriptorType, Any]]:
    """Return the ``__slots__`` values of the user's classes: by name, the slot and its value.

    A class may hide a base's slot behind a property, so values are read and written through the
    slots (:func:`put_in_slot`).
    """
    found: dict[str, tuple[types.MemberDescriptorType, Any]] = {}
    for kind in type(item).__mro__:
        if _is_library(kind.__module__):
            continue
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            own = f"_{kind.__name__.lstrip('_')}{name}" if _is_mangled(name) else name
            slot = vars(kind).get(own)
            if own in found or not isinstance(slot, types.MemberDescriptorType):
                continue
            if (value := in_slot(item, slot)) is not EMPTY:
                found[own] = (slot, value)
    return found


EMPTY = object()  # marks an unset slot


def in_slot(item: Any, slot: types.MemberDescriptorType) -> Any:
    """Return the value in an object's slot, EMPTY if it is unset."""
    try:
        return slot.__get__(item)
    except AttributeError:
        return EMPTY


def put_in_slot(item: Any, slot: types.MemberDescriptorType, value: Any) -> None:
    """Set an object's slot unless it already has the value."""
    if in_slot(item, slot) is not value:
        slot.__set__(item, value)


def _is_mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _is_library(name: str | None) -> bool:
    """Return whether a module belongs to torch, NumPy, the standard library or fxpart."""
    return (name or "").partition(".")[0] in _LIBRARIES


def _own(item: Any) -> Any:
    """Return the dict of an object's own attributes, None if it has none."""
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None


def _members(container: Any) -> Iterator[Any]:
    if len(container) <= _LARGE:
        yield from container.values() if isinstance(container, _MAPPINGS) else container


def _same(held: dict[str, Any], content: dict[str, Any]) -> bool:
    """Return whether two dicts have the same objects under the same keys in the same order."""
    return len(held) == len(content) and all(
        a is b and held[a] is content[b] for a, b in zip(held, content, strict=True)
    )


def _refill(container: Any, content: Any) -> None:
    """Restore a container's content if it changed."""
    if isinstance(container, _MAPPINGS):
        if not _same(container, content):
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        if container != content:
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(
        a is not b for a, b in zip(container, content, strict=True)
    ):
        container.clear()
        container.extend(content)
