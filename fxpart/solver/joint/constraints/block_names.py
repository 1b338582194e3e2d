"""Block name patterns: ``layers.0-11``, ``lm_head``, ``#3-7``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from fxpart.errors import error

_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


def match_blocks(blocks: Sequence[str], pattern: str) -> tuple[int, ...]:
    """Return the indices of the blocks that match a pattern, ascending.

    ``#3-7`` selects blocks by number. Otherwise the dotted parts of the pattern must occur
    consecutively in the block's name; a part ``0-11`` matches each number in the range. Raises
    FXP109 if nothing matches.
    """
    numbered = _RANGE.match(pattern[1:]) if pattern.startswith("#") else None
    if numbered:
        found = tuple(i for i in range(len(blocks)) if _within(str(i), numbered))
    else:
        parts = pattern.split(".")
        found = tuple(i for i, name in enumerate(blocks) if _names(name.split("."), parts))
    if not found:
        raise error(
            "FXP109",
            where=f"blocks {pattern!r}",
            why="No block matches.",
            fix=f"The blocks are {', '.join(blocks[:4])} ... {blocks[-1]}; "
            "#0-3 are the first four.",
        )
    return found


def _names(name: Sequence[str], parts: Sequence[str]) -> bool:
    width = len(parts)
    return any(
        all(_fits(given, part) for given, part in zip(name[i : i + width], parts, strict=True))
        for i in range(len(name) - width + 1)
    )


def _fits(given: str, part: str) -> bool:
    numbers = _RANGE.match(part)
    return given == part or (numbers is not None and _within(given, numbers))


def _within(number: str, bounds: re.Match[str]) -> bool:
    last = bounds.group(2) or bounds.group(1)
    return number.isdecimal() and int(bounds.group(1)) <= int(number) <= int(last)


def find_layer_blocks(blocks: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return (first, last) block of each layer of the longest stack of numbered modules, or ().

    ``transformer.h.0.attn`` and ``transformer.h.0.mlp`` are layer 0 of the stack ``transformer.h``.
    The layers of a stack must be contiguous.
    """
    best: tuple[tuple[int, int], ...] = ()
    stacks = dict.fromkeys(stack for name in blocks for stack, _ in _numbered(name))
    for stack in stacks:
        where = [
            (next((n for s, n in _numbered(name) if s == stack), -1), i)
            for i, name in enumerate(blocks)
        ]
        grouped = groupby(where, key=lambda pair: pair[0])
        runs = [(number, [i for _, i in run]) for number, run in grouped]
        found = tuple((run[0], run[-1]) for number, run in runs if number >= 0)
        rising = [number for number, _ in runs if number >= 0]
        if len(found) > len(best) and rising == sorted(set(rising)):
            best = found
    return best


def _numbered(name: str) -> list[tuple[str, int]]:
    """Yield each (stack, number) in a block's name."""
    parts = name.split(".")
    return [
        (".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdecimal() and i
    ]
