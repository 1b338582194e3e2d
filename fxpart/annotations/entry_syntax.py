"""Syntax of annotation keys and values, and its validation.

A key is a pattern (``*``, ``?``, ``[...]`` as in fnmatch; ``*`` matches dots) of parameter and
buffer names, or one of ``input:``, ``node:``, ``module:`` and ``op:`` before a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cache

from fxpart.errors import FxpartError, Problem
from fxpart.sharding import Placement
from fxpart.sharding.placement import parse_placement

KINDS = ("input", "node", "module", "op")
STATE = "state"  # a key without a kind: a parameter or buffer
WHOLE = "-"  # an op that an axis does not shard: "op:linear" = "tp:-"
FIX = 'write "layers.*.up.weight", "input:x", "node:linear_1", "module:layers.0.mlp" = "tp:S(0)"'

_AXIS = re.compile(r"[a-z][a-z0-9_]*\Z")
_FACTOR = re.compile(r"(-|\+\d{1,3}|[A-Za-z_]\w*(/\d{1,9})?)\Z")


@dataclass(frozen=True)
class AnnotationKey:
    """A parsed key. kind: "state" or one of KINDS. pattern: the name pattern."""

    kind: str
    pattern: str

    @classmethod
    def parse(cls, text: str) -> AnnotationKey:
        """Parse any text; without a known kind it is a pattern of state names."""
        kind, colon, rest = text.partition(":")
        return cls(kind, rest) if colon and kind in KINDS else cls(STATE, text)

    def matches(self, name: str) -> bool:
        """Return whether a name matches the pattern or equals it (names may have brackets)."""
        return name == self.pattern or _compiled(self.pattern).match(name) is not None

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the matching names, in order."""
        if not any(mark in self.pattern for mark in "*?["):
            return [self.pattern] if self.pattern in names else []
        return [name for name in names if self.matches(name)]


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def read_placements(text: str) -> dict[str, Placement]:
    """Parse ``"dp:S(0),tp:R"`` by axis, for any mesh; ``?`` is omitted. Raise FXP109."""
    found: dict[str, Placement] = {}
    for axis, word in _pairs(text, "placements", "dp:S(0),tp:R"):
        placement = parse_placement(word)
        if placement is not None:
            found[axis] = placement
    return found


def read_strategies(text: str) -> dict[str, str]:
    """Parse an op's ``"dp:b,tp:-"`` by axis: a factor, ``-`` (returned as "") or ``+0``.

    Raise FXP109 for invalid text.
    """
    found: dict[str, str] = {}
    for axis, word in _pairs(text, "factors", "dp:b,tp:-"):
        if word == "?":
            continue
        if not _FACTOR.match(word):
            raise FxpartError(
                Problem("FXP109", f"factor {word[:40]!r}", "it is not a factor", f"write {WHOLE!r}")
            )
        found[axis] = "" if word == WHOLE else word
    return found


def _pairs(text: str, what: str, example: str) -> list[tuple[str, str]]:
    """Return axes and words; raise FXP109 for an invalid or repeated axis."""
    pairs: list[tuple[str, str]] = []
    for part in filter(None, (p.strip() for p in re.split(r",(?![^(]*\))", text))):
        axis, colon, word = (p.strip() for p in part.partition(":"))
        if not colon or not _AXIS.match(axis) or axis in dict(pairs):
            why = f"{part[:40]!r} is not a new axis, a colon and a word"
            raise FxpartError(
                Problem("FXP109", f"{what} {text[:80]!r}", why, f'write them as "{example}"')
            )
        pairs.append((axis, word))
    return pairs


def text_problems(entries: Mapping[str, str]) -> list[Problem]:
    """Return all syntax problems of keys and values."""
    problems: list[Problem] = []
    for key, text in entries.items():
        where = f"annotation {str(key)[:80]!r}"
        if not isinstance(key, str) or not isinstance(text, str):
            why = f"a key and its placements must be text, not {type(text).__name__}"
            problems.append(Problem("FXP111", where, why, FIX))
            continue
        parsed = AnnotationKey.parse(key)
        if not parsed.pattern:
            problems.append(Problem("FXP111", where, "the key is empty", FIX))
        try:
            empty = not _read(parsed, text) and not text.strip()
        except FxpartError as cause:
            why = f"{cause.problems[0].where}: {cause.problems[0].why}"
            problems.append(Problem("FXP111", where, why, cause.problems[0].fix))
            continue
        if empty:
            problems.append(Problem("FXP111", where, "it has no placements", FIX))
    return problems


def _read(key: AnnotationKey, text: str) -> Mapping[str, Placement | str]:
    """Parse values by axis: factors of an op, placements of everything else."""
    return read_strategies(text) if key.kind == "op" else read_placements(text)


def merge_annotations(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Merge old and new entries by key and axis; raise FXP112 for contradictions."""
    result = dict(old)
    problems: list[Problem] = []
    for key, text in new.items():
        if key not in result:
            result[key] = text
            continue
        parsed = AnnotationKey.parse(key)
        had, given = _read(parsed, result[key]), _read(parsed, text)
        for axis in sorted(had.keys() & given.keys()):
            if had[axis] != given[axis]:
                why = f"{axis}:{had[axis] or WHOLE} before, but {axis}:{given[axis] or WHOLE} now"
                problems.append(
                    Problem("FXP112", f"annotation {key!r}", why, "remove one of the two")
                )
        both = {**had, **given}
        result[key] = ",".join(f"{axis}:{placed or WHOLE}" for axis, placed in both.items())
    if problems:
        raise FxpartError(problems)
    return result
