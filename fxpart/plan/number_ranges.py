"""Sequences of numbers as text with ranges: (0, 1, 2, 7) is "0-2,7"."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fxpart.cluster.validation import MAX_DEVICES

# A limit above any number of ranks or blocks: a short text must not exhaust memory.
MOST = max(MAX_DEVICES, 1 << 20)
_RUN = "[0-9]{1,9}(?:-[0-9]{1,9})?"
PATTERN = f"(?:{_RUN}(?:,{_RUN})*)?"
# The fields of a plan with such sequences; "[]" means every entry of a list.
FIELDS = (
    "devices",
    "order",
    "stages[].ranks",
    "prediction.ranks[].ranks",
    "prediction.hosts[].ranks",
)


def format_numbers(numbers: Sequence[int]) -> str:
    """Return the unique text for these non-negative numbers, in their order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_numbers(text: str, most: int = MOST) -> list[int] | None:
    """Return the numbers of a text; None where it is invalid or has more than ``most``."""
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
    """Replace sequences in FIELDS of a plan's plain data by texts, in place."""

    def text(value: Any) -> Any:
        plain = isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value)
        return format_numbers(value) if plain else value

    return _each(raw, text)


def lengthen(raw: dict[str, Any]) -> dict[str, Any]:
    """Replace texts in FIELDS of a plan's plain data by lists, in place; keep other values.

    Texts beyond the total that a plan can have are kept too.
    """
    remaining = 2 * MOST

    def numbers(value: Any) -> Any:
        nonlocal remaining
        found = parse_numbers(value, min(MOST, remaining)) if isinstance(value, str) else None
        remaining -= len(found or ())
        return value if found is None else found

    return _each(raw, numbers)


def _each(raw: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    for field in FIELDS:
        parents: list[Any] = [raw]
        *way, last = field.split(".")
        for step in way:
            name = step.removesuffix("[]")
            found = [parent.get(name) for parent in parents if isinstance(parent, dict)]
            if step.endswith("[]"):
                found = [item for each in found if isinstance(each, (list, tuple)) for item in each]
            parents = found
        for parent in parents:
            if isinstance(parent, dict) and last in parent:
                parent[last] = change(parent[last])
    return raw
