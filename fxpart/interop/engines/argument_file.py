"""Files of command-line arguments, one option with its values per line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from fxpart.errors import error


def format_arguments(rows: Iterable[Sequence[object]], comments: Iterable[str] = ()) -> str:
    """Return a shell-quoted line for each option, after the comments."""
    lines = [f"# {line}" for line in comments]
    lines += [" ".join(shlex.quote(str(word)) for word in row) for row in rows]
    return "\n".join(lines) + "\n"


def parse_arguments(text: str, where: str) -> dict[str, list[str]]:
    """Return the values of each option by its name without dashes, with underscores.

    Shell scripts work, too: words before the first option are skipped, and quotes, comments and
    line continuations have their meaning. Raises FXP407 for text that a shell could not parse.
    """
    found: dict[str, list[str]] = {}
    name = ""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as why:
        raise error(
            "FXP407", where=where, why=f"It is no list of arguments: {why}.",
            fix="Pass a file with one option per line, or a shell script.",
        ) from why  # fmt: skip
    for word in words:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if separator else []
        elif name and word not in ("(", ")"):
            found[name].append(word)
    return found
