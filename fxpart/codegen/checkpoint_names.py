"""Under which name a checkpoint holds a tensor: ties, and prefixes that it or the model lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fxpart.program.spec import ProgramSpec

_DEPTH = 2  # dotted words of a prefix


def stored_names(spec: ProgramSpec, stored: Collection[str]) -> dict[str, str]:
    """The stored name of each of the program's tensors that is there, by main name.

    A tie may be stored under any of its names. Where more names fit without the prefix that all
    names of a part of the model have ("transformer.", where the checkpoint is of the base model) or
    with one that it lacks ("module."), that prefix is left out or put in. The same on every rank.
    """
    aliases: dict[str, list[str]] = {}
    for alias, main in spec.aliases.items():
        aliases.setdefault(main, []).append(alias)
    held = (s.name for stage in spec.stages for s in stage.state)
    mains = list(dict.fromkeys((*held, *spec.unused)))
    names = {main: (main, *aliases.get(main, ())) for main in mains}
    there = set(stored)

    def found(change: Callable[[str], str]) -> dict[str, str]:
        fitting = {}
        for main, known in names.items():
            hit = next((n for n in map(change, known) if n in there), None)
            if hit is None:  # what has no such prefix: the head beside a base model
                hit = next((n for n in known if n in there), None)
            if hit is not None:
                fitting[main] = hit
        return fitting

    best = found(lambda name: name)
    if len(best) == len(names):
        return best
    for prefix in _heads(name for known in names.values() for name in known):
        other = found(lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
        best = other if len(other) > len(best) else best
    for prefix in _heads(stored):
        other = found(lambda name, prefix=prefix: prefix + name)  # type: ignore[misc]
        best = other if len(other) > len(best) else best
    return best


def _heads(names: Iterable[str]) -> list[str]:
    """The first words of dotted names, each with its dot."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        for count in range(1, min(_DEPTH, len(words) - 1) + 1):
            found[".".join(words[:count]) + "."] = None
    return sorted(found)
