"""Values that code writes in place: tensors, arrays, random generators and iterators."""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

_ITERATORS = ("itertools", "builtins")


@dataclass
class ValueSnapshot:
    """A tensor, array or generator with a copy of its value."""

    owner: Any
    path: str
    name: str
    value: Any
    version: int


def global_generators() -> dict[str, Any]:
    """Return the generators behind the functions of Python's ``random`` and ``numpy.random``."""
    found = {"Python's random numbers": random.getstate.__self__}  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy.random")
    owner = getattr(getattr(numpy, "get_state", None), "__self__", None)
    return found if owner is None else {**found, "NumPy's random numbers": owner}


def is_array(value: Any) -> bool:
    """Return whether a value is a NumPy array."""
    return type(value).__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "shape")


def is_generator(value: Any) -> bool:
    """Return whether a value generates random numbers."""
    if isinstance(value, (random.Random, torch.Generator)):
        return True
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and (
        hasattr(value, "bit_generator") or hasattr(value, "get_state")
    )


def is_iterator(value: Any) -> bool:
    """Return whether a value is one of Python's built-in iterators."""
    kind = type(value)
    return (
        kind.__module__ in _ITERATORS and hasattr(value, "__next__") and hasattr(value, "__iter__")
    )


def position(value: Any) -> Any:
    """Return what an iterator yields next, as text; for generators, the current instruction."""
    frame = getattr(value, "gi_frame", None)
    if frame is not None or hasattr(value, "gi_code"):
        return None if frame is None else (frame.f_lasti, repr(frame.f_locals)[:500])
    try:
        return repr(_reduced(value.__reduce__()))[:2000]
    except (TypeError, NotImplementedError):
        return None


def _reduced(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_reduced(each) for each in value)
    return _reduced(value.__reduce__()) if is_iterator(value) else value


def generator_state(value: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if hasattr(value, "bit_generator"):
        return copy.deepcopy(value.bit_generator.state)
    return value.get_state()


def _set_generator(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def value_of(value: Any) -> Any:
    """Return a copy of the value of a tensor, an array or a generator."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if is_array(value) else generator_state(value)


def version(value: Any) -> int:
    """Return how often a tensor was written in place; 0 for other values."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0
    return int(value._version)


def has_changed(memory: ValueSnapshot) -> bool:
    """Return whether the value differs from the recorded one."""
    value = memory.owner
    if isinstance(value, torch.Tensor):
        return not same(value, memory.value)
    if is_array(value):
        return value.shape != memory.value.shape or bool((value != memory.value).any())
    if is_iterator(value):
        return bool(position(value) != memory.value)
    return not _equal_states(generator_state(value), memory.value)


def _equal_states(a: Any, b: Any) -> bool:
    """Return whether two states of random generators are equal: numbers, tensors and arrays."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and a.keys() == b.keys()
            and all(_equal_states(value, b[key]) for key, value in a.items())
        )
    if is_array(a):
        return is_array(b) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (tuple, list)) and any(is_array(each) for each in a):
        return len(a) == len(b) and all(map(_equal_states, a, b))
    return bool(a == b)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in every bit (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def restore_value(memory: ValueSnapshot) -> None:
    """Restore the recorded value."""
    value = memory.owner
    if memory.value is None:
        return
    if isinstance(value, torch.Tensor):
        # Batch normalization writes its statistics without incrementing the tensor's version.
        if version(value) != memory.version or not same(value, memory.value):
            value.copy_(memory.value)
    elif is_array(value):
        if value.flags.writeable:
            value[...] = memory.value
    elif not is_iterator(value):
        _set_generator(value, memory.value)
