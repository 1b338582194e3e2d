"""Exact JSON encoding of Python values; values that JSON lacks become small objects.

These are non-finite numbers, integers above 64 bits (states of NumPy's generators), tuples, bytes,
and dicts with other keys than strings (learning-rate schedulers).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

_INT64_LIMIT = 1 << 63


def to_json_value(value: Any, where: str = "value") -> Any:
    """Encode a value; TypeError naming its place if it is not supported."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # NumPy scalars
    if isinstance(value, int):
        return int(value) if -_INT64_LIMIT <= value < _INT64_LIMIT else {"$int": hex(value)}
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
    raise TypeError(
        f"{where} has the type {type(value).__name__}, which checkpoints do not support"
    )


def from_json_value(value: Any) -> Any:
    """Decode a value of :func:`to_json_value`; ValueError for other values."""
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind.startswith("$"):
            return _decode_object(kind, content)
    return {key: from_json_value(item) for key, item in value.items()}


def _decode_object(kind: str, content: Any) -> Any:
    """Decode a small object."""
    if kind == "$int" and isinstance(content, str) and len(content) < 10_000:
        return int(content, 16)
    if kind == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "$bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if kind == "$tuple" and isinstance(content, list):
        return tuple(from_json_value(item) for item in content)
    if kind == "$items" and isinstance(content, list):
        pairs = [
            from_json_value(pair) for pair in content if isinstance(pair, list) and len(pair) == 2
        ]
        try:
            found = dict(pairs)
        except TypeError as cause:  # an unhashable key
            raise ValueError(f"{kind} has an unhashable key") from cause
        if len(found) == len(content):
            return found
    raise ValueError(f"{kind[:20]!r} is not an encoded value")
