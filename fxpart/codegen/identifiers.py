"""Python identifiers and comments from model names that can never become code.

All output is ASCII and depends only on the text, so the same model gives the same bytes.
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
    """Return a new ASCII identifier similar to ``text``, and add it to ``taken``.

    Other characters become underscores. Names that start with a digit or an underscore (two are
    mangled inside a class) get a "v". A number distinguishes repeated names, keywords and builtins.
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
    """Map original names to attributes of the stage module, for pairs (original name, kind).

    The prefix of the kind (``p_``, ``b_``, ``c_``) avoids the names of ``torch.nn.Module``.
    """
    taken: set[str] = set()
    return {name: identifier(name, taken, prefix=f"{kind[0]}_") for name, kind in names}


def quoted(text: str) -> str:
    """Return a string literal, in double quotes if no character needs an escape."""
    plain = text.isascii() and text.isprintable() and not set(text) & set('"\\')
    return f'"{text}"' if plain else ascii(text)


def comment(text: str) -> str:
    """Return text as one printable ASCII line; all other characters are escaped."""
    return text.encode("unicode_escape").decode("ascii")


def place(source: str) -> str:
    """Return a source reference without machine-specific folders, relative to "site-packages".

    Other absolute paths keep their last two components.
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
