"""Names from a model made into Python identifiers and comments that can never become code.

Everything is ASCII and depends on the text alone, so that the same model gives the same bytes.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

_RESERVED = frozenset(
    (*keyword.kwlist, *keyword.softkwlist, *(n for n in dir(builtins) if n.isidentifier()))
)


def identifier(text: str, taken: set[str], prefix: str = "") -> str:
    """A fresh ASCII identifier that resembles ``text``; it is added to ``taken``.

    Other characters become underscores; names that start with a digit or an underscore (two are
    mangled inside a class) get a "v"; a number sets apart a repeated name, a keyword, a builtin.
    """
    name = prefix + re.sub(r"[^A-Za-z0-9_]", "_", text)
    if not name or name[0].isdigit() or name[0] == "_":
        name = f"v{name}" if name.startswith("_") else f"v_{name}"
    base = name
    count = 0
    while name in taken or name in _RESERVED:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def attributes(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Original name -> attribute of the stage module, for pairs (original name, kind).

    The prefix of the kind (``p_``, ``b_``, ``c_``) keeps clear of ``torch.nn.Module``'s own names.
    """
    taken: set[str] = set()
    return {name: identifier(name, taken, prefix=f"{kind[0]}_") for name, kind in names}


def quoted(text: str) -> str:
    """A string literal, in double quotes where nothing has to be escaped."""
    plain = text.isascii() and text.isprintable() and not set(text) & set('"\\')
    return f'"{text}"' if plain else ascii(text)


def comment(text: str) -> str:
    """One printable ASCII line: control characters and all else are escaped."""
    return text.encode("unicode_escape").decode("ascii")


def place(source: str) -> str:
    """A source reference without the machine's folders: "site-packages" and all before it go.

    Paths that are absolute otherwise keep their last two parts.
    """
    path, colon, line = source.rpartition(":")
    if not colon:
        path, line = source, ""
    pure = PurePosixPath(path.replace("\\", "/"))
    parts = pure.parts
    if "site-packages" in parts:
        parts = parts[len(parts) - parts[::-1].index("site-packages") :]
    elif pure.is_absolute() or re.match(r"[A-Za-z]:", path):
        parts = parts[1:][-2:]
    text = "/".join(parts)
    return comment(f"{text}:{line}" if colon else text)
