"""Cached functions that evaluate shapes written in a program's symbols."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fxpart.program.spec import Dim, InputSpec, dim_value

Sizes = Mapping[str, int]


def make_dim_function(entry: Dim) -> Callable[[Sizes], int]:
    """Return a function from symbol sizes to the size that ``entry`` denotes."""
    if isinstance(entry, int):
        number = entry
        return lambda sizes: number
    if entry.isidentifier():
        name = entry
        return lambda sizes: sizes[name]
    text, known = entry, dict[tuple[tuple[str, int], ...], int]()

    def value(sizes: Sizes) -> int:
        # Parsing an expression takes longer than a small transfer, and sizes seldom change.
        key = tuple(sizes.items())
        if key not in known:
            known[key] = dim_value(text, sizes)
        return known[key]

    return value


def make_shape_function(entries: Sequence[Dim]) -> Callable[[Sizes], tuple[int, ...]]:
    """Return a function from symbol sizes to the shape that ``entries`` denote."""
    if all(isinstance(entry, int) for entry in entries):
        fixed = tuple(int(entry) for entry in entries)
        return lambda sizes: fixed
    dims = tuple(make_dim_function(entry) for entry in entries)
    last: list[tuple[Sizes | None, tuple[int, ...]]] = [(None, ())]

    def found(sizes: Sizes) -> tuple[int, ...]:
        # Microbatches of equal sizes share one immutable object.
        before, known = last[0]
        if before is not sizes:
            known = tuple([each(sizes) for each in dims])
            last[0] = (sizes, known)
        return known

    return found


def find_symbols(entries: Iterable[Dim]) -> set[str]:
    """Return the symbols that occur in the entries."""
    return {word for entry in entries for word in re.findall(r"[A-Za-z_]\w*", str(entry))}


def find_symbol_sources(
    symbols: Mapping[str, tuple[str, int]], inputs: Sequence[InputSpec], given: Collection[str]
) -> Mapping[str, tuple[str, int]]:
    """Return the input and dim that each symbol is read from if only some inputs are given.

    symbols: the sources in a complete batch. A symbol that is no dim of a given input is omitted.
    """
    if all(name in given for name, _ in symbols.values()):
        return symbols
    found = {}
    for symbol, place in symbols.items():
        others = ((i.name, at) for i in inputs for at, e in enumerate(i.shape) if e == symbol)
        read = next((p for p in (place, *others) if p[0] in given), None)
        if read is not None:
            found[symbol] = read
    return found
