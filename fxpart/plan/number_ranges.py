"""Sequences of numbers as text in which runs are short: (0, 1, 2, 7) is "0-2,7"."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fxpart.cluster.validation import MAX_DEVICES

# More numbers than a plan can have ranks or blocks; a short text must not fill the memory.
MOST = max(MAX_DEVICES, 1 << 20)
_RUN = "[0-9]{1,9}(?:-[0-9]{1,9})?"
PATTERN = f"(?:{_RUN}(?:,{_RUN})*)?"
# Where a plan holds such sequences, by field; "[]" stands for every entry of a list.
FIELDS = (
    "devices",
    "order",
    "stages[].ranks",
    "prediction.ranks[].ranks",
    "prediction.hosts[].ranks",
)


def text_of(numbers: Sequence[int]) -> str:
    """The one text for these numbers (none negative), in their order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numbers_of(text: str, most: int = MOST) -> list[int] | None:
    """The numbers that a text stands for; None where it is no such text, or names too many."""
    if not re.fullmatch(PATTERN, text):
        return None
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        a, b = int(first), int(last or first)
        if b < a or len(found) + b - a >= most:
            return None
        found += range(a, b + 1)
    return found


def shorten(raw: dict[str, Any]) -> dict[str, Any]:
    """A plan's plain data with texts for FIELDS, changed in place."""

    def text(value: Any) -> Any:
        plain = isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value)
        return text_of(value) if plain else value

    return _each(raw, text)


def lengthen(raw: dict[str, Any]) -> dict[str, Any]:
    """A plan's plain data with lists for FIELDS, changed in place; other values are left.

    Those that would be more than a plan can have, all together, are left too.
    """
    left = 2 * MOST

    def numbers(value: Any) -> Any:
        nonlocal left
        found = numbers_of(value, min(MOST, left)) if isinstance(value, str) else None
        left -= len(found or ())
        return value if found is None else found

    return _each(raw, numbers)


def _each(raw: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    for field in FIELDS:
        holders: list[Any] = [raw]
        *way, last = field.split(".")
        for step in way:
            name = step.removesuffix("[]")
            found = [holder.get(name) for holder in holders if isinstance(holder, dict)]
            if step.endswith("[]"):
                found = [item for each in found if isinstance(each, (list, tuple)) for item in each]
            holders = found
        for holder in holders:
            if isinstance(holder, dict) and last in holder:
                holder[last] = change(holder[last])
    return raw
