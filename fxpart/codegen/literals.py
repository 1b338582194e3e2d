"""Python text for arguments and targets of FX nodes.

Every value allowed in an FX argument is written or rejected with FXP108. Strings become escaped
literals; names must be identifiers that resolve to the traced object.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpart import rng
from fxpart.codegen.identifiers import identifier, quoted
from fxpart.compat import registering_module
from fxpart.compiler.collective_calls import is_collective
from fxpart.compiler.effects import is_op
from fxpart.compiler.function_ops import __name__ as FUNCTION_OPS
from fxpart.compiler.function_ops import find_function, format_load
from fxpart.errors import FxpartError, error

INFIX: dict[Callable[..., Any], str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
PREFIX: dict[Callable[..., Any], str] = {
    operator.neg: "-",
    operator.pos: "+",
    operator.invert: "~",
    operator.not_: "not ",
}
_BUILTINS = frozenset(
    ("abs", "bool", "complex", "float", "int", "len", "max", "min", "pow", "round")
)
DEVICE = "self.device"
MESH = "self.mesh"  # the rank's communicator
COLLECTIVES = "fxpart.collectives"
# Strides of an op's result may differ on the device that runs the module; graphs have no writes.
ANY_STRIDES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


class NameScope:
    """Names of one generated module: operations at module level, values inside ``forward``."""

    def __init__(self) -> None:
        """Start with the names that every module uses."""
        self.taken = {"NAMES", "self", "torch", "math", "operator", "seeded", "aten", "collectives"}
        self.operations: dict[str, str] = {}  # alias -> dotted path
        self.modules: set[str] = set()
        self.values: dict[fx.Node, str] = {}
        self._aliases: dict[Any, str] = {}

    def operation(self, target: Any, where: str) -> str:
        """Return the module-level name of a callable, defined on first use."""
        target = ANY_STRIDES.get(target, target)
        if target is rng.seeded:
            self.modules.add("fxpart.rng")
            return "seeded"
        if is_collective(target):
            self.modules.add(COLLECTIVES)
            return f"collectives.{target.__name__}"
        if target not in self._aliases:
            path = _path(target, where)
            if path.startswith("builtins."):
                return path.removeprefix("builtins.")
            self.modules.add("torch" if is_op(target) else path.partition(".")[0])
            if is_op(target) and (home := _home(target)) and _importable(home):
                self.modules.add(home)  # importing this module registers the op
            short = str(target) if is_op(target) else path.removeprefix("torch.")
            short = short.removesuffix(".default")
            alias = identifier(short, self.taken)
            self.operations[alias] = path
            self._aliases[target] = alias
        return self._aliases[target]

    def value(self, node: fx.Node) -> str:
        """Return the local name of a node's value."""
        if node not in self.values:
            self.values[node] = identifier(node.name, self.taken)
        return self.values[node]


def _home(target: Any) -> str | None:
    """Return the module whose import registers an op, or has the function that does."""
    return FUNCTION_OPS if find_function(target) else registering_module(target)


def _importable(module: str) -> bool:
    """Return whether another process can import a module by this name."""
    parts = module.split(".")
    plain = all(p.isidentifier() and p.isascii() and not keyword.iskeyword(p) for p in parts)
    return plain and module != "__main__"


def _path(target: Any, where: str) -> str:
    """Return the expression that resolves to ``target``: a dotted path, but for some ops."""
    if (function := find_function(target)) is not None:
        return format_load(function)
    if is_op(target):
        parts = str(target).split(".")
        if len(parts) == 3 and all(p.isidentifier() and p.isascii() for p in parts):
            if keyword.iskeyword(parts[2]):  # aten.random has the overload "from"
                return f'getattr(torch.ops.{parts[0]}.{parts[1]}, "{parts[2]}")'
            return ".".join(("torch", "ops", *parts))
        raise _refuse(where, f"the name of operator {target} is not an identifier")
    name = getattr(target, "__name__", "")
    for module in (operator, math, builtins):
        if name and getattr(module, name, None) is target:
            if module is not builtins or name in _BUILTINS:
                return f"{module.__name__}.{name}"
    if isinstance(target, Hashable) and target in _functions():
        path = str(torch.overrides.resolve_name(target))
        found: Any = torch
        for part in path.split(".")[1:]:
            found = getattr(found, part, None) if part.isidentifier() else None
        if found is target and path.startswith("torch.") and path.isascii():
            return path
    raise _refuse(where, f"it calls the {type(target).__name__} {target!r}")


@cache
def _functions() -> frozenset[Any]:
    """Return torch's functions of tensors and symbolic numbers, without file and mode functions."""
    tables = torch.overrides.get_overridable_functions()
    sizes = (torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_int, torch.sym_float)
    return frozenset(f for functions in tables.values() for f in functions) | frozenset(sizes)


def _refuse(where: str, why: str) -> FxpartError:
    return error(
        "FXP108",
        where=where,
        why=f"{why}, which cannot be written as Python code",
        fix="rewrite the line with torch operations, or wrap it in torch.library.custom_op",
    )


def literal(value: Any, names: NameScope, where: str) -> str:
    """Return the Python text of one argument; node values appear by their local names."""
    if isinstance(value, fx.Node):
        return names.value(value)
    if value is None or value is Ellipsis or isinstance(value, bool):
        return "..." if value is Ellipsis else str(value)
    if isinstance(value, str):
        return quoted(str(value))
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, int | float | complex):
        return number(value, names)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return _torch_constant(value, where)
    if isinstance(value, slice | range):
        parts = (value.start, value.stop, value.step)
        inner = ", ".join(literal(part, names, where) for part in parts)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, list | tuple):
        inner = ", ".join(literal(item, names, where) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        items = (
            f"{literal(k, names, where)}: {literal(v, names, where)}" for k, v in value.items()
        )
        return "{" + ", ".join(items) + "}"
    if is_op(value):
        return names.operation(value, where)
    raise _refuse(where, f"it has an argument of type {type(value).__name__}")


def number(value: int | float | complex, names: NameScope) -> str:
    """Return the text of a number that evaluates to the same number, including NaN."""
    if isinstance(value, complex):
        return f"complex({number(value.real, names)}, {number(value.imag, names)})"
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(float(value))
        names.modules.add("math")
        if math.isnan(value):
            return "math.nan"
        return "math.inf" if value > 0 else "-math.inf"
    return repr(int(value))


def _torch_constant(value: torch.dtype | torch.layout | torch.memory_format, where: str) -> str:
    text = str(value)
    if text.startswith("torch.") and getattr(torch, text[6:], None) is value:
        return text
    raise _refuse(where, f"it uses {text}")


def call(node: fx.Node, names: NameScope, where: str) -> str:
    """Return the Python expression of one ``call_function`` or ``call_method`` node."""
    args = node.args
    if node.op == "call_method":
        name = str(node.target)
        if not name.isidentifier() or name.startswith("_") or not hasattr(torch.Tensor, name):
            raise _refuse(where, f"it calls the method {name!r}")
        return f"{_atom(args[0], names, where)}.{name}({_arguments(args[1:], node, names, where)})"
    target: Any = node.target
    if not node.kwargs:
        if target is torch.ops.aten.sym_size.int and len(args) == 2:
            return f"{_atom(args[0], names, where)}.size({literal(args[1], names, where)})"
        if target is operator.getitem and len(args) == 2:
            return f"{_atom(args[0], names, where)}[{literal(args[1], names, where)}]"
        if target in INFIX and len(args) == 2:
            left, right = (_atom(a, names, where) for a in args)
            return f"{left} {INFIX[target]} {right}"
        if target in PREFIX and len(args) == 1:
            return f"{PREFIX[target]}{_atom(args[0], names, where)}"
    text = _arguments(args, node, names, where)
    if is_collective(target):
        text = f"{MESH}, {text}"
    return f"{names.operation(target, where)}({text})"


def _atom(value: Any, names: NameScope, where: str) -> str:
    """Return an argument as an operand, in parentheses unless it is a name or a plain number."""
    text = literal(value, names, where)
    return text if text.isidentifier() or text.isdecimal() else f"({text})"


def _arguments(args: tuple[Any, ...], node: fx.Node, names: NameScope, where: str) -> str:
    parts = [literal(a, names, where) for a in args]
    for key, value in node.kwargs.items():
        text = DEVICE if key == "device" and value is not None else literal(value, names, where)
        if key.isidentifier() and key.isascii() and not keyword.iskeyword(key):
            parts.append(f"{key}={text}")
        else:  # aten ops have arguments named "from"
            parts.append(f"**{{{quoted(key)}: {text}}}")
    return ", ".join(parts)
