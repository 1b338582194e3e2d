"""Shapes written in a program's symbols, as functions that remember what they have worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fxpart.program import Dim, dim_value

Sizes = Mapping[str, int]


def dim(entry: Dim) -> Callable[[Sizes], int]:
    """A function from symbol sizes to the size that ``entry`` stands for."""
    if isinstance(entry, int):
        number = entry
        return lambda sizes: number
    if entry.isidentifier():
        name = entry
        return lambda sizes: sizes[name]
    text, known = entry, dict[tuple[int, ...], int]()

    def value(sizes: Sizes) -> int:
        # Reading an expression takes longer than a small transfer; sizes seldom change.
        key = tuple(sizes.values())
        if key not in known:
            known[key] = dim_value(text, sizes)
        return known[key]

    return value


def shape(entries: Sequence[Dim]) -> Callable[[Sizes], tuple[int, ...]]:
    """A function from symbol sizes to the shape that ``entries`` stand for."""
    if all(isinstance(entry, int) for entry in entries):
        fixed = tuple(int(entry) for entry in entries)
        return lambda sizes: fixed
    dims = tuple(dim(entry) for entry in entries)
    last: list[tuple[Sizes | None, tuple[int, ...]]] = [(None, ())]

    def found(sizes: Sizes) -> tuple[int, ...]:
        # Microbatches of equal sizes have them in one object, which nobody changes.
        before, known = last[0]
        if before is not sizes:
            known = tuple([each(sizes) for each in dims])
            last[0] = (sizes, known)
        return known

    return found
