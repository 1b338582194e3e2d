"""Write ``fxpart/docs/api.md`` and ``fxpart/docs/errors.md`` from docstrings and the error table.

python tests/support/api_pages.py             (writes both pages)
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import fxpart
import fxpart.runtime
from fxpart.errors import CODES

DOCS = Path(__file__).resolve().parents[2] / "fxpart" / "docs"
WIDTH = 100
# Functions with their whole docstring, then classes with a table of their public members.
FUNCTIONS = ("compile", "annotate")
CLASSES: tuple[tuple[str, Any], ...] = (
    ("fxpart.Program", fxpart.Program),
    ("fxpart.runtime.Trainer", fxpart.runtime.Trainer),
    ("fxpart.runtime.Checkpoints", fxpart.runtime.Checkpoints),
    ("fxpart.Workload", fxpart.Workload),
    ("fxpart.Plan", fxpart.Plan),
    ("fxpart.Cluster", fxpart.Cluster),
)
# Members of a trainer that only other parts of fxpart call.
INTERNAL = {"calls", "is_collective", "kind", "note_loaded", "options", "repeats", "settle"}
STATUS = {
    1: "a difference was found",
    2: "invalid input",
    3: "infeasible",
    4: "environment",
    5: "the run failed",
    6: "the run ended unsaved or not finite",
    70: "a bug in fxpart",
}


def api() -> str:
    """Return the page of the Python interface."""
    parts = [
        "# Python API\n\nWritten by `tests/support/api_pages.py` from the docstrings."
        " `help(fxpart.compile)` prints the same, and each class has the full description of its"
        " members.\n"
    ]
    for name in FUNCTIONS:
        found = getattr(fxpart, name)
        text = docstring(found).split("\n\nRaises")[0]
        parts.append(f"## fxpart.{name}\n\n```python\n{signature(name, found)}\n```\n\n{text}\n")
    for title, cls in CLASSES:
        parts.append(f"## {title}\n\n{first_sentence(docstring(cls))}\n\n{members(cls)}\n")
    return "\n".join(parts)


def signature(name: str, function: Any) -> str:
    """Return names and defaults of the parameters, without types, wrapped."""
    words = arguments(function)
    text = f"{name}({', '.join(words)})"
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False))


def arguments(function: Any) -> list[str]:
    """Return the parameters without ``self`` as they are written in a call."""
    found, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            found.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = prefix.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            shown = repr(parameter.default)
            text += f"={shown if len(shown) < 20 and '<' not in shown else '...'}"
        found.append(text)
    return found


def docstring(thing: Any) -> str:
    """Return the docstring with single-line paragraphs, roles of Sphinx removed."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", inspect.getdoc(thing) or "").replace("``", "`")
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop that ends a sentence."""
    return re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0]


def members(cls: type) -> str:
    """Return a table of public methods and properties with the first sentence of each."""
    rows = ["| member | description |", "| --- | --- |"]
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in INTERNAL or not inspect.getdoc(getattr(cls, name)):
            continue
        if isinstance(member, property):
            shown = name
        elif isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            shown = f"{name}({', '.join(arguments(getattr(cls, name)))})"
        else:
            continue
        text = first_sentence(docstring(getattr(cls, name))).replace("|", "\\|")
        rows.append(f"| `{shown}` | {text} |")
    return "\n".join(rows)


def errors() -> str:
    """Return the index of error codes."""
    rows = [
        f"| [{code}](errors/{code}.md) | {title} | {status} |"
        for code, (title, status) in CODES.items()
    ]
    statuses = "; ".join(f"{status} {text}" for status, text in STATUS.items())
    return "\n".join(
        [
            "# Errors",
            "",
            "Every error has a code. A message states where it happened, why, and how to fix it,"
            " and lists all problems at once. `fxpart explain FXP204` prints the page of a code.",
            "",
            f"Exit statuses of the command line: {statuses}.",
            "",
            "| code | meaning | exit status |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


PAGES = {"api": api, "errors": errors}


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / f"{page}.md").write_text(make(), encoding="utf-8")
