"""Python state that a run of the model may change, restored after the run.

A capture runs the user's forward several times, on fake tensors and under a tracer. Each run has to
start from the state that the user left: a flag, a cache or a hook of an earlier run would change
the graph, and a fake tensor in a cache would break the model.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpart.capture.sources import is_users

_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_MAPPINGS, list, set, deque)
_CACHE = type(functools.lru_cache(lambda: None))
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "fxpart", "numpy"}
_MOST = 100_000  # objects that are noted
_LARGE = 10_000  # items: the objects inside of larger containers are not looked at


@dataclass
class PythonState:
    """What the code of modules and functions can change without an operation on a tensor.

    That is: class and attributes of every submodule; the content of containers and the attributes
    of the user's own objects in these; global variables, closures and lru_caches that the code
    names. Tensors are kept by identity, not by value. Caches of functools are only ever emptied.
    seen keeps a reference to each object, so that an id stays the object's.
    """

    seen: dict[int, Any] = field(default_factory=dict)
    kinds: set[type] = field(default_factory=set)
    classes: list[tuple[nn.Module, type]] = field(default_factory=list)
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    variables: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, *roots: Any) -> PythonState:
        """The state that is reachable from modules and functions as it is now; None is nothing."""
        state = cls()
        for root in roots:
            state._add(root)
        return state

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within: the state may change; after: it is as it was when it was noted."""
        self._empty_caches()
        try:
            yield
        finally:
            self._restore()

    def _add(self, root: Any) -> None:
        """Note the state of an object and of all that is reachable from it."""
        waiting = [root]
        while waiting:
            item = waiting.pop()
            if item is None or id(item) in self.seen or isinstance(item, _PLAIN):
                continue
            if len(self.seen) > _MOST:
                break
            self.seen[id(item)] = item
            waiting += self._parts(item)

    def _parts(self, item: Any) -> Iterator[Any]:
        """Note one object; what is to be looked at next."""
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
        elif not _is_library(type(item).__module__) and type(_own(item)) is dict:
            yield from self._attributes(_own(item))
            yield from self._class(type(item))

    def _module(self, module: nn.Module) -> Iterator[Any]:
        self.classes.append((module, type(module)))
        yield from self._attributes(vars(module))
        yield from self._class(type(module))

    def _attributes(self, held: dict[str, Any]) -> Iterator[Any]:
        self.attributes.append((held, dict(held)))
        yield from held.values()

    def _class(self, kind: type) -> Iterator[Any]:
        """The methods of a user's class, whose globals may hold caches, and its own containers."""
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
            except ValueError:  # an empty cell
                continue
            self.cells.append((cell, content))
            yield content
        if not _is_library(item.__module__) and is_users(item.__code__.co_filename):
            yield getattr(item, "__wrapped__", None)
            yield from self._globals(item.__code__, item.__globals__)

    def _globals(self, code: types.CodeType, scope: dict[str, Any]) -> Iterator[Any]:
        """Variables that the code names in its module, and in modules of the user that it names."""
        scopes = [scope]
        for name in code.co_names:
            held = scope.get(name)
            if isinstance(held, types.ModuleType) and not _is_library(held.__name__):
                scopes.append(vars(held))
        for held in scopes:
            for name in code.co_names:
                if name in held and not isinstance(held[name], types.ModuleType):
                    self.variables.append((held, name, held[name]))
                    yield held[name]
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._globals(constant, scope)

    def _empty_caches(self) -> None:
        """Forget results that functools keeps: they may belong to another run."""
        for cache in self.caches:
            cache.cache_clear()

    def _restore(self) -> None:
        """Put everything back that is not as it was."""
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
        self._empty_caches()


_PLAIN = (
    bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size,
    types.ModuleType, types.BuiltinFunctionType,
)  # fmt: skip


def _is_library(name: str | None) -> bool:
    """Whether a module belongs to torch, NumPy, the standard library or fxpart."""
    return (name or "").partition(".")[0] in _LIBRARIES


def _own(item: Any) -> Any:
    """The dict of an object's own attributes, None where it has none."""
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None


def _members(container: Any) -> Iterator[Any]:
    if len(container) <= _LARGE:
        yield from container.values() if isinstance(container, _MAPPINGS) else container


def _same(held: dict[str, Any], content: dict[str, Any]) -> bool:
    """Whether two dicts have the same objects under the same keys in the same order."""
    return len(held) == len(content) and all(
        a is b and held[a] is content[b] for a, b in zip(held, content, strict=True)
    )


def _refill(container: Any, content: Any) -> None:
    """Give a container the content that it had, if it has another."""
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
