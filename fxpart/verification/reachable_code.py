"""Python code that a forward pass can reach, and the names it reads and writes."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fxpart.capture.source_locations import is_users, shorten_path

_STANDARD = (
    Path(sysconfig.get_path("stdlib")).as_posix() + "/",
    Path(sysconfig.get_path("platstdlib")).as_posix() + "/",
)
_PACKAGES = ("site-packages", "dist-packages")
_FXPART = Path(__file__).resolve().parent.parent.as_posix() + "/"
_TORCH = Path(torch.__file__).parent.as_posix() + "/"
_READS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
_WRITES = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR"))
_ELEMENTS = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR"))


_BY_TEXT = frozenset(("getattr", "hasattr", "attrgetter", "vars", "__dict__"))
_OPERATORS = frozenset(
    (
        "__getitem__", "__getattr__", "__getattribute__", "__contains__", "__iter__", "__len__",
        "__float__", "__int__", "__index__", "__bool__", "__mul__", "__rmul__", "__add__",
        "__radd__", "__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__eq__", "__lt__",
        "__gt__", "__le__", "__ge__", "__enter__", "__next__", "__get__", "__torch_function__",
    )
)  # fmt: skip
_LONGEST = 64  # maximum length of a constant that may be a key


def is_own(file: str) -> bool:
    """Return whether a file is the user's own, not of a package or the standard library."""
    path = Path(file).as_posix()
    if any(part in _PACKAGES for part in Path(file).parts) or path.startswith(_FXPART):
        return False
    return not path.startswith((*_STANDARD, _TORCH, "<frozen"))


def is_models(file: str) -> bool:
    """Return whether a file may contain model code: the user's own or a model library."""
    path = Path(file).as_posix()
    if path.startswith(("<frozen", _FXPART)):
        return False
    packaged = any(part in _PACKAGES for part in Path(file).parts)
    own = path.startswith("<") or is_users(file)
    return own and (packaged or not path.startswith(_STANDARD))


@dataclass
class ReachableCode:
    """Functions that forward and loss can call, found from the names in their code.

    functions: by id of the code object, while the objects are alive. names: all names that their
    code mentions or passes to ``getattr``. constants: short strings in the user's own code. kinds:
    reachable classes of the user.
    """

    functions: dict[int, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    kinds: set[type] = field(default_factory=set)
    _waiting: list[FunctionType] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, loss: Any) -> ReachableCode:
        """Collect the code from the ``forward`` of every module and from the loss."""
        found = cls()
        for root in (model, loss):
            if isinstance(root, nn.Module):
                modules = list(root.modules())
                for module in modules:
                    found._forward_of(module)
                for module in modules:
                    found._hooks_of(module)
                held = {type(v) for m in modules for v in vars(m).values() if is_own_class(type(v))}
                found._methods({type(m) for m in modules} | held)
            elif root is not None:
                found.add(root)
                if not isinstance(root, (FunctionType, MethodType, functools.partial)):
                    found._methods({type(root)})
        known: set[type] = set()
        while fresh := found.kinds - known:
            known |= fresh
            found._methods(fresh, _OPERATORS)
            found._methods(known)
        return found

    @property
    def texts(self) -> set[str]:
        """Strings that may be attribute names, as passed to ``getattr``."""
        return set(filter(str.isidentifier, self.constants)) if self.names & _BY_TEXT else set()

    def _note_kind(self, value: Any) -> None:
        """Record the class of a user's object that code names."""
        if not isinstance(value, (type, nn.Module)) and is_own_class(type(value)):
            self.kinds.add(type(value))

    def code(self) -> Iterator[CodeType]:
        """Yield all code objects, including nested ones."""
        for function in self.functions.values():
            yield from nested(function.__code__)

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a callable, and what it calls through its globals and closure."""
        if depth > 8:
            return
        if isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                if callable(each):
                    self.add(each, depth + 1)
        elif isinstance(value, MethodType):
            self.add(value.__func__, depth + 1)
            if not isinstance(value.__self__, nn.Module):
                self._methods({type(value.__self__)})
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, nn.Module):
            self._forward_of(value)
        elif not isinstance(value, type):
            call = next(
                (vars(k)["__call__"] for k in type(value).__mro__ if "__call__" in vars(k)), 0
            )
            if isinstance(call, FunctionType):
                self._function(call, depth)

    def _function(self, function: FunctionType, depth: int = 0) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            self._function(wrapped, depth)
        code = function.__code__
        if id(code) in self.functions or not is_models(code.co_filename):
            return
        self.functions[id(code)] = function
        for inner in nested(code):
            self.names.update(inner.co_names, inner.co_freevars)
            if is_own(code.co_filename):
                texts = [c for c in inner.co_consts if isinstance(c, str) and len(c) <= _LONGEST]
                self.constants.update(texts)
                if _BY_TEXT & {*inner.co_names}:
                    self.names.update(filter(str.isidentifier, texts))
        for cell in function.__closure__ or ():
            try:
                self._note_kind(cell.cell_contents)
                self.add(cell.cell_contents, depth + 1)
            except ValueError:  # empty cell
                continue
        if is_own(code.co_filename):
            for name in code.co_names:
                value = function.__globals__.get(name)
                self._note_kind(value)
                if isinstance(value, (FunctionType, functools.partial)):
                    self.add(value, depth + 1)

    def _forward_of(self, module: nn.Module) -> None:
        forward = getattr(module, "forward", None)
        self.add(getattr(forward, "__func__", forward))

    def _hooks_of(self, module: nn.Module) -> None:
        for slot in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in vars(module).get(slot, {}).values():
                self.add(hook)

    def _methods(self, kinds: Iterable[type], called: frozenset[str] = frozenset()) -> None:
        """Add methods whose name the code found so far mentions, until there are no more.

        called: names of methods that are called implicitly.
        """
        methods = [
            (name, value.fget if isinstance(value, property) else value)
            for kind in {base for each in kinds for base in each.__mro__}
            for name, value in vars(kind).items()
            if name not in ("__init__", "forward")
        ]
        more = True
        while more:
            before = len(self.functions)
            for name, value in methods:
                if (name in self.names or name in called) and isinstance(value, FunctionType):
                    self._function(value)
            more = len(self.functions) > before

    def reads(self, name: str) -> str:
        """Return where the name is read other than to change it: "file.py:12: code", or ""."""
        for code in self.code():
            for line in _lines(code, name, _READS) - _changes(code, name):
                return _line(code, line)
        return ""

    def writes(self, name: str) -> str:
        """Return where the name is assigned, like :meth:`reads`."""
        for code in self.code():
            for line in sorted(_lines(code, name, _WRITES)):
                return _line(code, line)
        return ""

    def fills(self, name: str) -> bool:
        """Return whether the code assigns elements of the named container, like a cache."""
        return any(
            _changes(code, name) - _lines(code, name, _WRITES)
            or (name in code.co_names and "setdefault" in code.co_names)
            for code in self.code()
        )

    def stored(self) -> set[str]:
        """Return the names that the code assigns: attributes, globals or nonlocals."""
        return {
            argument
            for code in self.code()
            for _, operation, argument in _instructions(code)
            if operation in _WRITES and argument not in code.co_cellvars
        }

    def mentions(self, name: str) -> str:
        """Return where the name is used at all, like :meth:`reads`."""
        for code in self.code():
            for line in sorted(_lines(code, name, _READS | _WRITES)):
                return _line(code, line)
        return ""


def global_names(code: CodeType) -> set[str]:
    """Return the globals that a code object loads or assigns, without nested code."""
    operations = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL")
    return {argument for _, operation, argument in _instructions(code) if operation in operations}


def is_own_class(kind: type) -> bool:
    """Return whether a class is defined in the user's own code."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_own(file))


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object and those of the functions defined inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _lines(code: CodeType, name: str, operations: frozenset[str]) -> set[int]:
    if name not in (*code.co_names, *code.co_freevars, *code.co_cellvars):
        return set()
    return {
        line
        for line, operation, argument in _instructions(code)
        if operation in operations and argument == name
    }


def _changes(code: CodeType, name: str) -> set[int]:
    """Return the lines on which the name, or an element of it, is assigned."""
    found = _lines(code, name, _WRITES)
    elements = {line for line, operation, _ in _instructions(code) if operation in _ELEMENTS}
    return found | (elements & _lines(code, name, _READS))


@functools.lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> tuple[tuple[int, str, Any], ...]:
    found, line = [], code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        found.append((line, instruction.opname, instruction.argval))
    return tuple(found)


def _line(code: CodeType, line: int) -> str:
    import linecache

    text = linecache.getline(code.co_filename, line).strip()
    return f"{shorten_path(code.co_filename)}:{line}" + (f": {text}" if text else "")
