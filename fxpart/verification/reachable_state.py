"""Record, compare and restore everything that a forward pass can change."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fxpart.capture.python_state import put_in_slot, slots_of_object
from fxpart.environment import get_variables
from fxpart.verification.mutable_object import (
    MISSING,
    MutableObject,
    StateChange,
    find_differences,
    get_context_value,
    join_path,
)
from fxpart.verification.object_values import (
    ATOMS,
    DEEPEST,
    get_content,
    get_slots,
    is_data,
    is_inspected,
    is_same_content,
    is_state,
)
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
    value_of,
    version,
)

MOST = 200_000  # maximum number of visited objects
SLOTS = ("_modules", "_parameters", "_buffers")


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
            for change in find_differences(holder):
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
            for key, each in get_content(value).items():
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
        elif is_inspected(value):
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
        content = {"get": get_context_value(variable)}

        def restore() -> None:
            if get_context_value(variable) is not content["get"]:
                variable.set(content["get"])

        read = lambda: {"get": get_context_value(variable)}  # noqa: E731
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
        content = get_content(value)

        def restore() -> None:
            if is_same_content(value, content):
                return
            value.clear()
            if isinstance(value, dict):
                value.update(content)
            elif isinstance(value, set):
                value.update(content.values())
            else:
                value.extend(content.values())

        holder = MutableObject(
            value, path, name, content, lambda: get_content(value), restore, sized=True
        )
        self.holders.append(holder)

    def _object(self, value: Any, path: str, name: str, depth: int) -> None:
        slots = getattr(value, "__dict__", None)
        if type(slots) is not dict and slots_of_object(value):
            self._slotted(value, path)
            self._elements(value, get_slots(value), path, depth, name)
        if type(slots) is dict:
            content = dict(slots)

            def restore() -> None:
                if not is_same_content(slots, content):
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
            MutableObject(value, path, "", content, lambda: get_slots(value), restore)
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
                    self._walk(item, join_path(path, inner), inner, depth + (key != "_modules"))
            else:
                self._walk(each, join_path(path, str(key)), name if inside else str(key), depth + 1)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        names = [
            n
            for n, v in vars(kind).items()
            if not n.startswith("__") and (isinstance(v, ATOMS) or is_data(v))
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
        self._walk(value, join_path(path, name), name, 1)

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
            known = sorted(n for n in used if n in space and is_state(space[n]))
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


def _nothing() -> None:
    """Do nothing, because the environment is not restored."""


def _inner(code: Any) -> Iterator[Any]:
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield constant
            yield from _inner(constant)
