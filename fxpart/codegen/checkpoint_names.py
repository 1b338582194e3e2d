"""Map program state to checkpoint tensor names: tied names and missing or extra prefixes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fxpart.program.spec import ProgramSpec

_DEPTH = 2  # maximum components of a prefix


def stored_names(spec: ProgramSpec, stored: Collection[str]) -> dict[str, str]:
    """Return the checkpoint name of each stored tensor of the program, by main name.

    A tied tensor may be stored under any of its names. If more names match after removing a common
    prefix of the model's names ("transformer.", for a checkpoint of the base model) or after adding
    a prefix of the checkpoint ("module."), that prefix is removed or added. The result is the same
    on every rank.
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
            if hit is None:  # names without the prefix, such as the head on top of a base model
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
    """Return the leading components of dotted names, each with its trailing dot."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        for count in range(1, min(_DEPTH, len(words) - 1) + 1):
            found[".".join(words[:count]) + "."] = None
    return sorted(found)
