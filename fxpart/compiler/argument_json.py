"""Convert FX node arguments to JSON and back.

A value that JSON cannot represent becomes a dict with one key, which names its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxpart.compiler.effects import is_op
from fxpart.compiler.function_names import function, name_of, operation
from fxpart.errors import error

Json = Any

_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def encode(item: Any) -> Json:
    """Return an argument as JSON; raise FXP900 for an object without a JSON form."""
    if isinstance(item, fx.Node):
        return {"node": item.name}
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return {"float": repr(item)}
    if isinstance(item, tuple):
        return {"tuple": [encode(i) for i in item]}
    if isinstance(item, list):
        return [encode(i) for i in item]
    if isinstance(item, dict):
        return {"dict": {k: encode(v) for k, v in item.items()}}
    if isinstance(item, slice):
        return {"slice": [encode(i) for i in (item.start, item.stop, item.step)]}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    if isinstance(item, _NAMED):
        return {"torch": plain_name(item)}
    if is_op(item):
        return {"operation": str(item)}
    if getattr(item, "namespace", "") == "higher_order":
        return {"operation": f"higher_order.{item.__name__}"}
    if callable(item):
        return {"function": name_of(item)}
    why = f"{type(item).__name__} has no JSON form"
    raise error("FXP900", where="graph serialization", why=why)


def plain_name(item: Any) -> str:
    """Return a torch constant's name without its prefix: "float32" for torch.float32."""
    return str(item).removeprefix("torch.")


def decode(item: Json, nodes: Mapping[str, fx.Node]) -> Any:
    """Return the argument that :func:`encode` wrote; raise ValueError for unknown data."""
    if isinstance(item, list):
        return [decode(i, nodes) for i in item]
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "node":
        return nodes[content]
    if kind == "tuple":
        return tuple(decode(i, nodes) for i in content)
    if kind == "dict":
        return {k: decode(v, nodes) for k, v in content.items()}
    if kind == "slice":
        return slice(*(decode(i, nodes) for i in content))
    if kind == "float":
        return float(content)
    if kind == "device":
        return torch.device(content)
    if kind == "torch":
        return constant(content, _NAMED)
    if kind == "operation":
        return operation(content)
    if kind == "function":
        return function(content)
    raise ValueError(f"Unknown kind of argument: {kind[:80]!r}")


def constant(name: str, kinds: type | tuple[type, ...]) -> Any:
    """Return the dtype, layout or memory format of this name; raise ValueError if unknown."""
    value = getattr(torch, name, None)
    if not isinstance(value, kinds):
        raise ValueError(f"Unknown dtype, layout or memory format: {name[:80]!r}")
    return value
