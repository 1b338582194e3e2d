"""Output to stdout (results) and stderr (notes, progress, errors), with escaped characters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from fxpart.errors import CODES, FxpartError

if TYPE_CHECKING:
    from fxpart.solver.progress import Progress

# Names from a model must not contain terminal control codes.
_UNSAFE = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}


def text(message: str) -> None:
    """Print a text result to stdout."""
    _write(sys.stdout, message)


def data(value: Any) -> None:
    """Print a result to stdout as JSON with sorted keys."""
    _write(sys.stdout, as_json(value))


def as_json(value: Any) -> str:
    """Return indented JSON with sorted keys; structs and dataclasses are objects."""
    encoded = msgspec.json.encode(value, order="sorted")
    return msgspec.json.format(encoded, indent=2).decode()


def line(value: Any) -> None:
    """Print one record to stdout as a line of JSON and flush."""
    _write(sys.stdout, msgspec.json.encode(value, order="sorted").decode())
    sys.stdout.flush()


def note(message: str) -> None:
    """Print a message to stderr, if that can be written; a command does not fail without it."""
    with suppress(OSError):
        _write(sys.stderr, message)


def failure(fault: FxpartError, *, as_json: bool) -> None:
    """Print all problems to stderr, and with ``--json`` also to stdout as data."""
    note(str(fault))
    if as_json:
        data({"error": problems(fault)})


def problems(fault: FxpartError) -> list[dict[str, str]]:
    """Return the problems of an error as plain data."""
    return [
        {"code": p.code, "title": CODES[p.code][0], "where": p.where, "why": p.why, "fix": p.fix}
        for p in fault.problems
    ]


@contextmanager
def show_activity(message: str) -> Iterator[None]:
    """Show an activity on stderr: a spinner on a terminal, else a line."""
    if not sys.stderr.isatty():
        note(f"{message} ...")
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextmanager
def show_messages(message: str, first: bool) -> Iterator[Callable[[str], None] | None]:
    """Yield a function that shows messages on a terminal, None elsewhere.

    Elsewhere, one line is printed. first: whether this is rank 0; other ranks print nothing.
    """
    if not first:
        yield None
        return
    if not sys.stderr.isatty():
        note(f"{message} ...")
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as status:
        yield lambda now: status.update(f"{message}: {now}")


@contextmanager
def show_solver_progress(message: str) -> Iterator[Callable[[Progress], None]]:
    """Show an activity; yield a function that shows a solver's progress on a terminal."""
    if not sys.stderr.isatty():
        note(f"{message} ...")
        yield ignore
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as status:
        yield lambda now: status.update(f"{message}: {now}")


def ignore(progress: Progress) -> None:
    """Ignore progress."""


def _write(file: TextIO, message: str) -> None:
    safe = message.translate(_UNSAFE)
    encoding = file.encoding or "utf-8"
    print(safe.encode(encoding, "backslashreplace").decode(encoding), file=file)
