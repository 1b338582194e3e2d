"""Compare modules: equal class, equal attributes, tensors of equal shape.

Layer indices (``layer_idx``) differ between layers. They do not matter if the layer's code never
reads them, which :data:`Untouchable` detects.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpart.compat import storage_address

Slot = tuple[str, str]  # submodule path ("" for the layer itself) and attribute name

_SINGLE = (type, types.FunctionType, types.ModuleType, nn.Module, torch.Tensor)
_NOT_THE_MODELS = {"torch", *sys.stdlib_module_names}
_PLAIN = (bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)


class IncomparableModuleError(Exception):
    """Raised for a module that cannot be compared, because its code or hooks may do anything."""


class LayerIndexAccessError(BaseException):
    """Raised when a layer reads its index; a BaseException, so that model code cannot catch it."""


def _touched(self: object, *args: object, **kwargs: object) -> Any:
    raise LayerIndexAccessError


_DUNDERS = """
    abs add and bool bytes call ceil complex contains delattr delitem dir divmod enter eq exit float
    floor floordiv format ge getattr getitem gt hash iadd iand ifloordiv ilshift imatmul imod imul
    index int invert ior ipow irshift isub iter itruediv ixor le len lshift lt matmul mod mul ne neg
    next or pos pow radd rand rdivmod reduce reduce_ex repr reversed rfloordiv rlshift rmatmul rmod
    rmul ror round rpow rrshift rshift rsub rtruediv rxor setattr setitem str sub truediv trunc xor
""".split()

_METHODS: dict[str, Any] = {f"__{name}__": _touched for name in _DUNDERS}

# Placeholder for a number that must not be read: any use raises LayerIndexAccessError, except
# passing it on, storing it and comparing it with None.
Untouchable = type("Untouchable", (), {**_METHODS, "__class__": property(_touched)})


@dataclass
class ModuleSignatureBuilder:
    """Builds a hashable description of one module.

    slots: numbers to ignore. counters: integers found, by slot. homes: storages in order of
    appearance. inside: submodule paths by id.
    """

    slots: frozenset[Slot]
    counters: dict[Slot, int] = field(default_factory=dict)
    homes: dict[object, int] = field(default_factory=dict)
    inside: dict[int, str] = field(default_factory=dict)

    def module(self, module: nn.Module, path: str) -> Hashable:
        """Describe class and attributes, including submodules."""
        if id(module) in self.inside:
            return "seen", self.inside[id(module)]
        self.inside[id(module)] = path
        rows: list[Any] = [type(module)]
        for name, held in vars(module).items():
            if name in ("_parameters", "_buffers"):
                rows.append((name, *((k, self.tensor(t)) for k, t in held.items())))
            elif name == "_modules":
                for key, inner in held.items():
                    below = f"{path}.{key}" if path else key
                    known = None if inner is None else self.module(inner, below)
                    rows.append((name, key, known))
            elif "hook" in name and held and not isinstance(held, bool):
                raise IncomparableModuleError(f"{path}.{name}")
            else:
                rows.append((name, self._attribute(held, (path, name))))
        return tuple(rows)

    def tensor(self, tensor: torch.Tensor | None) -> Hashable:
        """Describe a tensor without its values, and which tensors share storage."""
        if tensor is None:
            return None
        home = self.homes.setdefault(storage_address(tensor), len(self.homes))
        return (
            tuple(map(size, tensor.shape)), tuple(map(size, tensor.stride())),
            size(tensor.storage_offset()), tensor.dtype, tensor.device, tensor.requires_grad,
            tensor.is_leaf, home,
        )  # fmt: skip

    def _attribute(self, held: Any, slot: Slot) -> Hashable:
        """Describe an attribute of a module; record integers as possible layer indices."""
        if type(held) is Untouchable or (type(held) is int and slot in self.slots):
            return "counter"
        if type(held) is int:
            self.counters[slot] = held
        return self.value(held)

    def value(self, held: Any) -> Hashable:
        """Describe a plain value by content, anything else by identity."""
        if type(held) is Untouchable:
            return "counter"
        if held is None or isinstance(held, (int, *_PLAIN)):
            return type(held), repr(held) if isinstance(held, float) else held
        if isinstance(held, (list, tuple)):
            return type(held), *map(self.value, held)
        if isinstance(held, dict):
            return type(held), *((self.value(k), self.value(v)) for k, v in held.items())
        if isinstance(held, (set, frozenset)):
            return type(held), frozenset(map(self.value, held))
        if isinstance(held, types.MethodType) and id(held.__self__) in self.inside:
            return "method", id(held.__func__), self.inside[id(held.__self__)]
        return "is", id(held)


def size(number: int | torch.SymInt) -> Hashable:
    """Return a hashable size; symbols by their expression."""
    if isinstance(number, torch.SymInt):
        known = number.node.expr
        return int(known) if known.is_Integer else known
    return number


def structure(module: nn.Module, slots: frozenset[Slot] = frozenset()) -> Hashable:
    """Return a value that is equal for equal modules, ignoring the numbers in ``slots``.

    Objects that are not plain values (a configuration, a function) must be identical. Raise
    IncomparableModuleError for hooks. Valid while the modules are alive.
    """
    return ModuleSignatureBuilder(slots).module(module, "")


def counters(members: Sequence[nn.Module]) -> frozenset[Slot]:
    """Return the integer attributes that differ between all members: layer indices."""
    values: dict[Slot, list[int]] = defaultdict(list)
    for member in members:
        describer = ModuleSignatureBuilder(frozenset())
        describer.module(member, "")
        for slot, number in describer.counters.items():
            values[slot].append(number)
    return frozenset(
        slot
        for slot, found in values.items()
        if len(found) == len(members) > 1 and len(set(found)) == len(found)
    )


def snapshot_contents(module: nn.Module) -> list[object]:
    """Return the objects in a module's attributes, to detect writes.

    Compare two snapshots item by item with ``is``.
    """
    found: list[object] = []
    for inner in module.modules():
        _take(vars(inner), found)
    return found


def snapshot_globals(module: nn.Module) -> list[object]:
    """Return the objects in the globals of the module's code, to detect changes.

    These are the files of its classes and the files that they import from, except torch and the
    standard library. Compare two snapshots item by item with ``is``.
    """
    kinds = dict.fromkeys(base for inner in module.modules() for base in type(inner).__mro__)
    near = _files(kinds)
    far = _files(held for file in near for held in vars(file).values())
    found: list[object] = []
    for file in dict.fromkeys((*near, *far)):
        _take(vars(file), found)
    return found


def _files(held: Iterable[object]) -> list[types.ModuleType]:
    """Return the Python modules among these objects, and those that define them."""
    found: dict[types.ModuleType, None] = {}
    for item in held:
        if isinstance(item, (type, types.FunctionType)):
            file = sys.modules.get(str(item.__module__))
        else:
            file = item if isinstance(item, types.ModuleType) else None
        if file is not None and file.__name__.partition(".")[0] not in _NOT_THE_MODELS:
            found[file] = None
    return list(found)


def _inside(held: object) -> Iterable[object]:
    """Return the attribute values of an object without running its code."""
    try:
        own = object.__getattribute__(held, "__dict__")
    except AttributeError:
        return ()
    return tuple(own.values()) if isinstance(own, dict) else ()


def _take(attributes: Mapping[str, object], found: list[object]) -> None:
    """Add the attribute values and the items of containers and objects."""
    for held in tuple(attributes.values()):
        found.append(held)
        if isinstance(held, dict):  # some override values() and import modules
            found += [*dict.keys(held), *dict.values(held)]
        elif type(held) in (list, tuple, set):
            found += held  # type: ignore[arg-type]
        elif not isinstance(held, _SINGLE):
            found += _inside(held)


@contextmanager
def forbid_counter_access(module: nn.Module, slots: Iterable[Slot]) -> Iterator[None]:
    """Raise LayerIndexAccessError if the numbers in ``slots`` are read in this context."""
    replaced = []
    stand_in = Untouchable()
    for path, name in slots:
        attributes = vars(module.get_submodule(path))
        replaced.append((attributes, name, attributes[name]))
        attributes[name] = stand_in
    try:
        yield
    finally:
        for attributes, name, number in replaced:
            attributes[name] = number
