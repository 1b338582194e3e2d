"""Python values as JSON that gives them back exactly: what JSON lacks is put into small objects.

Numbers that are not finite, integers of more than 64 bits (NumPy's generators have them), tuples,
bytes, and dicts with other keys than strings (learning rate schedulers have them).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

_SMALL = 1 << 63


def to_json_value(value: Any, where: str = "value") -> Any:
    """What stands in the JSON for a value; TypeError, naming its place, where nothing can."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # NumPy's numbers
    if isinstance(value, int):
        return int(value) if -_SMALL <= value < _SMALL else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [to_json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_json_value(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [
            [to_json_value(k, where), to_json_value(v, f"{where}[{k!r}]")] for k, v in value.items()
        ]
        return {"$items": pairs}
    raise TypeError(f"{where} is a {type(value).__name__}, which no checkpoint holds")


def from_json_value(value: Any) -> Any:
    """The value that :func:`to_json_value` made this of; ValueError where it made nothing of the
    kind.
    """
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, held),) = value.items()
        if kind.startswith("$"):
            return _special(kind, held)
    return {key: from_json_value(item) for key, item in value.items()}


def _special(kind: str, held: Any) -> Any:
    """What one of the small objects stands for."""
    if kind == "$int" and isinstance(held, str) and len(held) < 10_000:
        return int(held, 16)
    if kind == "$float" and held in ("inf", "-inf", "nan"):
        return float(held)
    if kind == "$bytes" and isinstance(held, str):
        return base64.b64decode(held, validate=True)
    if kind == "$tuple" and isinstance(held, list):
        return tuple(from_json_value(item) for item in held)
    if kind == "$items" and isinstance(held, list):
        pairs = [
            from_json_value(pair) for pair in held if isinstance(pair, list) and len(pair) == 2
        ]
        try:
            found = dict(pairs)
        except TypeError as cause:  # a key that cannot be one
            raise ValueError(f"{kind} has a key that is none") from cause
        if len(found) == len(held):
            return found
    raise ValueError(f"{kind[:20]!r} is none of a checkpoint's values")
