"""Ops that call a user's torch.autograd.Function, which no tracer keeps.

A graph calls ``fxpart_functions::<name>``, and the op calls ``Function.apply``. So forward and
backward are those of the class, also in a stage that is loaded without the model.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from fxpart.errors import error

NAMESPACE = "fxpart_functions"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_RUNNING: ContextVar[bool] = ContextVar("fxpart_function_runs", default=False)


@dataclass(frozen=True)
class FunctionOp:
    """The op of one class and schema.

    schema: without the op's name, "(Tensor a0, float a1) -> Tensor". pointwise: whether forward and
    backward compute each element from the elements at its place.
    """

    kind: type
    schema: str
    pointwise: bool
    name: str

    @property
    def overload(self) -> Any:
        """The op, as a graph calls it."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def run(self, *args: Any) -> Any:
        """Apply the function."""
        with applying():
            return self.kind.apply(*args)  # type: ignore[attr-defined]


_OPS: dict[tuple[type, str, bool], FunctionOp] = {}
_NAMES: dict[str, FunctionOp] = {}


def define(kind: type, schema: str, *, pointwise: bool) -> Any:
    """Return the op of a subclass of torch.autograd.Function, the same one for equal arguments.

    Its name is the same in every process that defines the ops of a model in one order, also where
    the class is in a module of another name.
    """
    key = (kind, schema, pointwise)
    if key not in _OPS:
        text = f"{kind.__qualname__}{schema}{pointwise}"
        base = re.sub(r"\W", "_", kind.__qualname__.rpartition(".")[2], flags=re.ASCII)
        base = f"{base}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        name, count = base, 1
        while name in _NAMES:  # a class that was defined again under its name
            count += 1
            name = f"{base}_{count}"
        made = FunctionOp(kind, schema, pointwise, name)
        tags = (torch.Tag.pointwise,) if pointwise else ()
        _LIBRARY.define(f"{name}{schema}", tags=tags)
        _LIBRARY.impl(name, made.run, "CompositeImplicitAutograd")
        _OPS[key] = _NAMES[name] = made
    return _OPS[key].overload


def find_function(target: Any) -> FunctionOp | None:
    """Return what an op of this module calls; None for other ops and callables."""
    namespace, _, name = str(target).partition(".")
    return _NAMES.get(name.removesuffix(".default")) if namespace == NAMESPACE else None


def format_load(function: FunctionOp) -> str:
    """Return the expression that gives the op in another process, as :func:`load` runs it."""
    return f"{__name__}.load({_path_of(function.kind)!r}, {function.schema!r}, " + (
        f"{function.name!r}, pointwise={function.pointwise})"
    )


def load(path: str, schema: str, name: str, *, pointwise: bool) -> Any:
    """Return the op of this name, defined by importing the class where it is not yet known.

    path: "package.module:Class". Raise FXP108 if it cannot be imported.
    """
    known = _NAMES.get(name)
    if known is not None and _path_of(known.kind) == path:
        return known.overload
    module, _, qualname = path.partition(":")
    try:
        kind = attrgetter(qualname)(importlib.import_module(module))
    except (ImportError, AttributeError) as cause:
        raise error(
            "FXP108",
            where=f"torch.autograd.Function {path}",
            why=f"the program calls this class, and importing it fails: {cause}",
            fix="define it at the top of a module that every process can import",
        ) from cause
    return define(kind, schema, pointwise=pointwise)


@contextmanager
def applying() -> Iterator[None]:
    """Mark the calls inside as those of an op of this module (:func:`is_applying`)."""
    token = _RUNNING.set(True)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def is_applying() -> bool:
    """Return whether an op of this module is running."""
    return _RUNNING.get()


def _path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
