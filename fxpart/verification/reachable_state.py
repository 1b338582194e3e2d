"""Record, compare and restore everything that a forward pass can change."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fxpart.capture.python_state import in_slot, is_holder, put_in_slot, slots_of_object
from fxpart.environment import get_variables
from fxpart.verification.reachable_code import ReachableCode, global_names, is_own, is_own_class
from fxpart.verification.value_snapshot import (
    ValueSnapshot,
    global_generators,
    has_changed,
    is_array,
    is_generator,
    is_iterator,
    position,
    restore_value,
    same,
    value_of,
    version,
)

MOST = 200_000  # maximum number of visited objects
DEEPEST = 12  # maximum nesting depth
ATOMS = (int, float, bool, str, bytes, complex, type(None))
SLOTS = ("_modules", "_parameters", "_buffers")
MISSING = object()
# Suffixes of settings classes in packages.
_SETTINGS = ("Config", "Namespace", "Dict", "Arguments", "Args", "Options", "Settings", "Params")
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
            return lambda: _got(owner)
        if owner is get_variables():
            return lambda: get_variables().get(key, MISSING)
        read = self.read
        return lambda: read().get(key, MISSING)


@dataclass
class ReachableState:
    """The state reachable from a model, its loss and the code that they run.

    Parameters and registered buffers are restored but excluded from :meth:`changes`, since their
    values are compared with those of the captured program.
    """

    holders: list[MutableObject] = field(default_factory=list)
    memories: list[ValueSnapshot] = field(default_factory=list)
    registered: set[int] = field(default_factory=set)
    left_out: set[int] | frozenset[int] = frozenset()
    _seen: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, loss: Any, code: ReachableCode, *, copies: bool = True
    ) -> ReachableState:
        """Record the state.

        copies: also the values of parameters and of the model's registered buffers.
        """
        found = cls()
        for root in (model, loss):
            if isinstance(root, nn.Module):
                found.registered |= {id(t) for t in (*root.parameters(), *root.buffers())}
        buffers = [*loss.buffers()] if isinstance(loss, nn.Module) else []
        found.left_out = frozenset() if copies else found.registered - {id(b) for b in buffers}
        found._walk(model, "", "", 0)
        found._walk(loss, "loss", "loss", 0)
        for function in code.functions.values():
            found._function(function)
        found._environment(code)
        for name, generator in global_generators().items():
            found._walk(generator, name, name, 0)
        return found

    def restore(self) -> None:
        """Restore every value."""
        for holder in self.holders:
            holder.restore()
        with torch.no_grad():
            for memory in self.memories:
                restore_value(memory)

    def changes(self, values: bool = True) -> list[StateChange]:
        """Return the differences from the recorded state. values: also tensors written in place."""
        found: dict[str, StateChange] = {}
        for holder in self.holders:
            if holder.name in SLOTS and holder.sized:
                continue  # compared by state_dict keys
            for change in _differences(holder):
                found.setdefault(change.path, change)
        for memory in self.memories if values else ():
            if id(memory.owner) not in self.registered and has_changed(memory):
                kind = "tensor" if isinstance(memory.owner, torch.Tensor) else "object"
                kind = "random" if is_generator(memory.owner) else kind
                kind = "iterator" if is_iterator(memory.owner) else kind
                found.setdefault(memory.path, StateChange(memory.path, memory.name, kind))
        return list(found.values())

    # -- what is reachable -----------------------------------------------------------------------

    def _walk(self, value: Any, path: str, name: str, depth: int) -> None:
        if isinstance(value, ATOMS) or id(value) in self._seen or depth > DEEPEST:
            return
        if isinstance(value, type):
            if is_own_class(value):
                self._class(value)
            return
        if len(self._seen) > MOST:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor) or is_generator(value) or is_array(value):
            kept = None if id(value) in self.left_out else value_of(value)
            self.memories.append(ValueSnapshot(value, path, name, kept, version(value)))
        elif is_iterator(value):
            self.memories.append(ValueSnapshot(value, path, name, position(value), 0))
        elif isinstance(value, (list, deque, dict, set, bytearray)):
            self._container(value, path, name)
            for key, each in _content(value).items():
                self._walk(each, f"{path}[{key!r:.40}]", name, depth + 1)
        elif isinstance(value, (tuple, frozenset)):
            for index, each in enumerate(value):
                self._walk(each, f"{path}[{index}]", name, depth + 1)
        elif isinstance(value, functools.partial):
            self._scope(value.keywords, f"{path}.keywords", [*value.keywords])
            for each in (value.func, value.args, *value.keywords.values()):
                self._walk(each, path, name, depth + 1)
        elif isinstance(value, ContextVar):
            self._variable(value, path)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._walk(value.__self__, path, name, depth + 1)
        elif isinstance(value, CellType):
            self._cell(value, name, path)
        elif _is_open(value):
            self._object(value, path, name, depth)

    def _scope(self, space: dict[str, Any], path: str, names: list[str]) -> None:
        """Record names of a dict of variables."""
        content = {n: space[n] for n in names}
        self.holders.append(
            MutableObject(
                space, f"{path}.", "", content,
                lambda: {n: space[n] for n in names if n in space}, lambda: space.update(content),
            )
        )  # fmt: skip

    def _variable(self, variable: ContextVar[Any], path: str) -> None:
        """Record the value of a context variable."""
        content = {"get": _got(variable)}

        def restore() -> None:
            if _got(variable) is not content["get"]:
                variable.set(content["get"])

        read = lambda: {"get": _got(variable)}  # noqa: E731
        self.holders.append(MutableObject(variable, path, "", content, read, restore))
        self._walk(content["get"], path, "get", 1)

    def _environment(self, code: ReachableCode) -> None:
        """Record environment variables that the code names."""
        if not code.names & {"environ", "getenv"}:
            return
        names = [n for n in sorted(code.constants) if n.isupper() or n in get_variables()]

        def read() -> dict[Any, Any]:
            return {n: get_variables().get(n, MISSING) for n in names}

        content = read()
        self.holders.append(
            MutableObject(get_variables(), "os.environ", "environ", content, read, _nothing)
        )

    def _container(self, value: Any, path: str, name: str) -> None:
        content = _content(value)

        def restore() -> None:
            if _content_is(value, content):
                return
            value.clear()
            if isinstance(value, dict):
                value.update(content)
            elif isinstance(value, set):
                value.update(content.values())
            else:
                value.extend(content.values())

        holder = MutableObject(
            value, path, name, content, lambda: _content(value), restore, sized=True
        )
        self.holders.append(holder)

    def _object(self, value: Any, path: str, name: str, depth: int) -> None:
        slots = getattr(value, "__dict__", None)
        if type(slots) is not dict and slots_of_object(value):
            self._slotted(value, path)
            self._elements(value, _slotted(value), path, depth, name)
        if type(slots) is dict:
            content = dict(slots)

            def restore() -> None:
                if not _content_is(slots, content):
                    slots.clear()
                    slots.update(content)

            self.holders.append(
                MutableObject(value, path, name, content, lambda: dict(slots), restore)
            )
            self._elements(value, content, path, depth, name)
        kind = type(value)
        if isinstance(value, (nn.Module,)) or is_own_class(kind):
            for base in kind.__mro__:
                if base not in (object, nn.Module) and is_own_class(base):
                    self._class(base)

    def _slotted(self, value: Any, path: str) -> None:
        """Record an object with ``__slots__`` instead of a dict."""
        slots = slots_of_object(value)

        def restore() -> None:
            for slot, before in slots.values():
                put_in_slot(value, slot, before)

        content = {name: before for name, (_, before) in slots.items()}
        self.holders.append(
            MutableObject(value, path, "", content, lambda: _slotted(value), restore)
        )

    def _elements(
        self, value: Any, content: dict[str, Any], path: str, depth: int, name: str
    ) -> None:
        # Code that reads elements of these mentions the object, not its attributes.
        inside = isinstance(value, (Mapping, Sequence))
        for key, each in content.items():
            if isinstance(value, nn.Module) and key in SLOTS:
                self._container(each, path, key)
                for inner, item in each.items():
                    self._walk(item, _join(path, inner), inner, depth + (key != "_modules"))
            else:
                self._walk(each, _join(path, str(key)), name if inside else str(key), depth + 1)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        names = [
            n
            for n, v in vars(kind).items()
            if not n.startswith("__") and (isinstance(v, ATOMS) or _is_data(v))
        ]
        content = {n: vars(kind)[n] for n in names}

        def restore() -> None:
            for each, before in content.items():
                if vars(kind).get(each) is not before:
                    setattr(kind, each, before)

        self.holders.append(
            MutableObject(
                kind, kind.__name__, "", content,
                lambda: {n: vars(kind)[n] for n in names if n in vars(kind)}, restore,
            )
        )  # fmt: skip
        for each, before in content.items():
            self._walk(before, f"{kind.__name__}.{each}", each, 1)

    def _cell(self, cell: CellType, name: str, path: str) -> None:
        try:
            value = cell.cell_contents
        except ValueError:
            return

        def read() -> dict[Any, Any]:
            try:
                return {name: cell.cell_contents}
            except ValueError:
                return {}

        def restore() -> None:
            cell.cell_contents = value

        self.holders.append(MutableObject(cell, path, "", {name: value}, read, restore))
        self._walk(value, _join(path, name), name, 1)

    def _function(self, function: FunctionType) -> None:
        if id(function.__code__) in self._seen:
            return
        self._seen[id(function.__code__)] = function
        label = function.__qualname__
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if name != "__class__" and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._cell(cell, name, label)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for each in defaults:
            self._walk(each, f"default of {label}", label, 1)
        if vars(function):
            self._walk(vars(function), label, label, 1)
        if is_own(function.__code__.co_filename):
            self._globals(function, label)

    def _globals(self, function: FunctionType, label: str) -> None:
        names, loaded = set(), set()
        for code in (function.__code__, *_inner(function.__code__)):
            names.update(code.co_names)
            loaded |= global_names(code)
        spaces = [(function.__globals__, "global")]
        for name in loaded & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and is_own(getattr(value, "__file__", None) or "<"):
                spaces.append((vars(value), name))
        for space, title in spaces:
            used = loaded if title == "global" else names
            known = sorted(n for n in used if n in space and _is_state(space[n]))
            self._space(space, title, known)

    def _space(self, space: dict[str, Any], title: str, names: list[str]) -> None:
        """Record names of a module's namespace; names that code adds later are not recorded."""
        fresh = [n for n in names if (id(space), n) not in self._seen]
        for name in fresh:
            self._seen[(id(space), name)] = None
        if not fresh:
            return
        content = {n: space[n] for n in fresh}
        join = "global " if title == "global" else f"{title}."
        self.holders.append(
            MutableObject(
                space, join, "", content,
                lambda: {n: space[n] for n in fresh if n in space}, lambda: space.update(content),
            )
        )  # fmt: skip
        for name, value in content.items():
            self._walk(value, join + name, name, 1)


def _got(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _nothing() -> None:
    """Do nothing, because the environment is not restored."""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _inner(code: Any) -> Iterator[Any]:
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield constant
            yield from _inner(constant)


def _content(value: Any) -> dict[Any, Any]:
    """Return a container's elements by key; sets and sequences by position."""
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


def _content_is(value: Any, content: dict[Any, Any]) -> bool:
    now = _content(value)
    return len(now) == len(content) and all(
        key in content and content[key] is each for key, each in now.items()
    )


def _differences(holder: MutableObject) -> Iterator[StateChange]:
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
    return path + name if path.endswith((" ", ".")) else _join(path, name)


def _is_data(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque, torch.Tensor)) or is_generator(value)


def _is_state(value: Any) -> bool:
    """Return whether a global may hold state: not a module, or a class or code of a package."""
    if isinstance(value, ModuleType):
        return False
    if isinstance(value, type):
        return is_own_class(value)
    if isinstance(value, FunctionType):
        return is_own(value.__code__.co_filename)
    if isinstance(value, (tuple, functools.partial, ContextVar)):
        return True
    return isinstance(value, ATOMS) or _is_data(value) or is_array(value) or _is_open(value)


def equal(before: Any, after: Any, depth: int = 0) -> bool:
    """Return whether two values are interchangeable: equal elements and attributes."""
    if before is after:
        return True
    if type(before) is not type(after) or isinstance(before, nn.Module) or depth > DEEPEST:
        return False
    one, other = _parts(before), _parts(after)
    if one is not None and other is not None:
        return one.keys() == other.keys() and all(
            equal(each, other[key], depth + 1) for key, each in one.items()
        )
    if isinstance(before, torch.Tensor):
        return same(before, after)
    try:
        return bool(before == after)
    except (TypeError, ValueError, RuntimeError):
        return False


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a value, None for one without parts."""
    if isinstance(value, (list, tuple, deque, dict)):
        return _content(value)
    if isinstance(value, FunctionType):
        cells = [id(cell) for cell in value.__closure__ or ()]
        return dict(enumerate((value.__code__, value.__defaults__, value.__kwdefaults__, cells)))
    if isinstance(value, functools.partial):
        return dict(enumerate((value.func, value.args, value.keywords)))
    if _is_open(value) and not isinstance(value, (MethodType, Enum)):
        return {**(getattr(value, "__dict__", None) or {}), **_slotted(value)}
    return None


def _slotted(value: Any) -> dict[str, Any]:
    """Return the values in an object's slots, by name."""
    return {name: each for name, (_, each) in slots_of_object(value).items()}


def _is_open(value: Any) -> bool:
    """Return whether an object's attributes are inspected: modules and plain objects."""
    if isinstance(value, nn.Module):
        return True
    kind = type(value)
    root = kind.__module__.partition(".")[0]
    if root in ("torch", "numpy", "fxpart", "threading", "logging", "weakref"):
        return False
    if is_holder(kind):
        return True
    return is_own_class(kind) or kind.__name__.endswith(_SETTINGS)
