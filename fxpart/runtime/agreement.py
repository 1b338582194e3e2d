"""Ranks that disagree find out before anything is sent, and all say the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from fxpart.errors import CODES, FxpartError, Problem
from fxpart.runtime.transport import Transport

_BITS = 63
T = TypeVar("T")


def digest(text: str) -> int:
    """A 63-bit digest of a text."""
    raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> (64 - _BITS)


def agree(transport: Transport, what: str, make: Callable[[], tuple[T, str]]) -> T:
    """Run ``make`` on every process and return its value if all succeed with the same text.

    make: returns a value and a text that describes it. what: what is compared, for the message.
    Raises on every process: the problems of every process that failed (each once, in order of
    rank), or FXP501 with the texts where they differ.
    """
    problems: Sequence[Problem] = ()
    value: T | None = None
    text = ""
    try:
        value, text = make()
    except FxpartError as failure:
        if transport.ranks == len(transport.local):
            raise
        problems = failure.problems
    if transport.ranks == len(transport.local):
        assert value is not None
        return value
    rows = transport.exchange([len(problems), digest(text)])
    if any(row[0] for row in rows):
        raise FxpartError(merge(transport.exchange_bytes(problems_of(problems))))
    if any(row != rows[0] for row in rows):
        texts = [raw.decode(errors="replace") for raw in transport.exchange_bytes(text.encode())]
        raise FxpartError(_difference(what, texts))
    assert value is not None
    return value


def problems_of(problems: Sequence[Problem]) -> bytes:
    """Problems as a message."""
    return msgspec.json.encode([(p.code, p.where, p.why, p.fix) for p in problems])


def merge(messages: Sequence[bytes]) -> list[Problem]:
    """The problems of all messages, each once."""
    found: dict[Problem, None] = {}
    for message in messages:
        for code, where, why, fix in msgspec.json.decode(
            message, type=list[tuple[str, str, str, str]]
        ):
            found[Problem(code if code in CODES else "FXP504", where, why, fix)] = None
    return list(found)


def _difference(what: str, texts: Sequence[str]) -> Problem:
    """FXP501: which ranks have which text, from where they differ on."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    start = _common(list(groups))
    lines = [
        f"rank {', '.join(map(str, ranks))}: ...{text[start : start + 160]}"
        for text, ranks in groups.items()
    ]
    return Problem(
        "FXP501",
        what,
        "\n".join(lines),
        "give every rank the same script, arguments and batches in the same order",
    )


def _common(texts: list[str]) -> int:
    """Where the texts begin to differ, a little before it."""
    shortest = min(map(len, texts))
    for at in range(shortest):
        if len({text[at] for text in texts}) > 1:
            return max(0, at - 20)
    return max(0, shortest - 20)
