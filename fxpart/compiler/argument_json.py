"""Arguments of ops as JSON and back; whatever JSON has no word for becomes a dict with one key."""

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
    """An argument in JSON's own types; FXP900 for an object that has no name."""
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
    raise error("FXP900", where="writing a graph", why=f"{type(item).__name__} has no JSON form")


def plain_name(item: Any) -> str:
    """ "float32" for torch.float32."""
    return str(item).removeprefix("torch.")


def decode(item: Json, nodes: Mapping[str, fx.Node]) -> Any:
    """The inverse of :func:`encode`; ValueError for what it never writes."""
    if isinstance(item, list):
        return [decode(i, nodes) for i in item]
    if not isinstance(item, dict):
        return item
    ((kind, held),) = item.items()
    if kind == "node":
        return nodes[held]
    if kind == "tuple":
        return tuple(decode(i, nodes) for i in held)
    if kind == "dict":
        return {k: decode(v, nodes) for k, v in held.items()}
    if kind == "slice":
        return slice(*(decode(i, nodes) for i in held))
    if kind == "float":
        return float(held)
    if kind == "device":
        return torch.device(held)
    if kind == "torch":
        return constant(held, _NAMED)
    if kind == "operation":
        return operation(held)
    if kind == "function":
        return function(held)
    raise ValueError(f"{kind[:80]!r} is no kind of argument")


def constant(name: str, kinds: type | tuple[type, ...]) -> Any:
    """A dtype, layout or memory format by its plain name; ValueError where it is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, kinds):
        raise ValueError(f"{name[:80]!r} is no name of a dtype or layout")
    return found
