"""Costs between those of two known sizes of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def interpolate(first: T, second: T, at: Callable[[float, float], float]) -> T:
    """Return costs like ``first``, with ``at(a, b)`` for each pair of numbers a, b of both.

    Structs and tuples are interpolated part by part, whole numbers are rounded up, and everything
    else is that of ``first``; None if either is.
    """
    one: Any = first
    two: Any = second
    found: Any = one
    if one is None or two is None:
        found = None
    elif isinstance(one, int):
        found = ceil(at(one, two))
    elif isinstance(one, float):
        found = at(one, two)
    elif isinstance(one, tuple):
        found = tuple(interpolate(a, b, at) for a, b in zip(one, two, strict=True))
    elif isinstance(one, msgspec.Struct):
        parts = {
            n: interpolate(getattr(one, n), getattr(two, n), at) for n in one.__struct_fields__
        }
        found = msgspec.structs.replace(one, **parts)
    return found  # type: ignore[no-any-return]
