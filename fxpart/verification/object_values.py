"""Python values that are inspected for state: their elements, attributes and equality."""

from __future__ import annotations

import functools
from collections import deque
from contextvars import ContextVar
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from fxpart.capture.python_state import is_holder, slots_of_object
from fxpart.verification.reachable_code import is_own, is_own_class
from fxpart.verification.value_snapshot import is_array, is_generator, same

DEEPEST = 12  # maximum nesting depth
ATOMS = (int, float, bool, str, bytes, complex, type(None))
# Suffixes of settings classes in packages.
_SETTINGS = ("Config", "Namespace", "Dict", "Arguments", "Args", "Options", "Settings", "Params")


def get_content(value: Any) -> dict[Any, Any]:
    """Return a container's elements by key; sets and sequences by position."""
    return dict(value) if isinstance(value, dict) else dict(enumerate(value))


def is_same_content(value: Any, content: dict[Any, Any]) -> bool:
    """Return whether a container still has the same elements as objects."""
    now = get_content(value)
    return len(now) == len(content) and all(
        key in content and content[key] is each for key, each in now.items()
    )


def is_data(value: Any) -> bool:
    """Return whether a value is a container, a tensor or a random generator."""
    return isinstance(value, (list, dict, set, deque, torch.Tensor)) or is_generator(value)


def is_state(value: Any) -> bool:
    """Return whether a global may hold state: not a module, or a class or code of a package."""
    if isinstance(value, ModuleType):
        return False
    if isinstance(value, type):
        return is_own_class(value)
    if isinstance(value, FunctionType):
        return is_own(value.__code__.co_filename)
    if isinstance(value, (tuple, functools.partial, ContextVar)):
        return True
    return isinstance(value, ATOMS) or is_data(value) or is_array(value) or is_inspected(value)


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
        return get_content(value)
    if isinstance(value, FunctionType):
        cells = [id(cell) for cell in value.__closure__ or ()]
        return dict(enumerate((value.__code__, value.__defaults__, value.__kwdefaults__, cells)))
    if isinstance(value, functools.partial):
        return dict(enumerate((value.func, value.args, value.keywords)))
    if is_inspected(value) and not isinstance(value, (MethodType, Enum)):
        return {**(getattr(value, "__dict__", None) or {}), **get_slots(value)}
    return None


def get_slots(value: Any) -> dict[str, Any]:
    """Return the values in an object's slots, by name."""
    return {name: each for name, (_, each) in slots_of_object(value).items()}


def is_inspected(value: Any) -> bool:
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
