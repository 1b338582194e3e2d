"""What goes to stdout (data) and to stderr (notes, progress, errors), and how it is made safe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from fxpart.errors import CODES, FxpartError

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

# A name from a model must not move the cursor or set the window's title.
_UNSAFE = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def text(words: str) -> None:
    """The verb's answer for a person, to stdout."""
    _write(sys.stdout, words)


def data(value: Any) -> None:
    """The verb's answer for a machine: JSON with sorted keys, to stdout."""
    _write(sys.stdout, as_json(value))


def as_json(value: Any) -> str:
    """Indented JSON with sorted keys; structs and dataclasses as objects."""
    encoded = msgspec.json.encode(value, order="sorted")
    return msgspec.json.format(encoded, indent=2).decode()


def line(value: Any) -> None:
    """One record of a stream for a machine: JSON on one line, to stdout, at once."""
    _write(sys.stdout, msgspec.json.encode(value, order="sorted").decode())
    sys.stdout.flush()


def note(words: str) -> None:
    """What a person may want to know meanwhile, to stderr."""
    _write(sys.stderr, words)


def failure(fault: FxpartError, *, as_json: bool) -> None:
    """Every problem to stderr, and with ``--json`` also to stdout as data."""
    note(str(fault))
    if as_json:
        data({"error": problems(fault)})


def problems(fault: FxpartError) -> list[dict[str, str]]:
    """The problems of an error as plain data."""
    return [
        {"code": p.code, "title": CODES[p.code][0], "where": p.where, "why": p.why, "fix": p.fix}
        for p in fault.problems
    ]


@contextmanager
def show_activity(words: str) -> Iterator[None]:
    """Say on stderr what is being done: a spinner on a terminal, a line elsewhere."""
    if not sys.stderr.isatty():
        note(f"{words} ...")
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(words):
        yield


@contextmanager
def show_messages(words: str, first: bool) -> Iterator[Callable[[str], None] | None]:
    """On a terminal what is done now, as it is told; elsewhere one line; nothing on other ranks."""
    if not first:
        yield None
        return
    if not sys.stderr.isatty():
        note(f"{words} ...")
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(words) as status:
        yield lambda now: status.update(f"{words}: {now}")


@contextmanager
def show_solver_progress(words: str) -> Iterator[Callable[[Progress], None]]:
    """As :func:`show_activity`; yield a function that shows a solver's progress on a terminal."""
    if not sys.stderr.isatty():
        note(f"{words} ...")
        yield ignore
        return
    from rich.console import Console

    with Console(stderr=True).status(words) as status:
        yield lambda now: status.update(f"{words}: {now}")


def ignore(progress: Progress) -> None:
    """Progress that nobody watches."""


def _write(stream: TextIO, words: str) -> None:
    safe = words.translate(_UNSAFE)
    encoding = stream.encoding or "utf-8"
    print(safe.encode(encoding, "backslashreplace").decode(encoding), file=stream)
