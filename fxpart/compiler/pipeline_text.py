"""Text form of a pipeline that round-trips: ``drop_asserts,group_blocks{granularity="op"}``.

Options are JSON values (true, 3, 0.5, "text", null), written only if they differ from the default,
in the order of the pass's fields.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

from fxpart.errors import FxpartError, Problem

Scalar = None | bool | int | float | str

_NAME = re.compile(r"[A-Za-z_]\w*(?:[.-]\w+)*")
_BARE = re.compile(r"[^\s,{}\"=]+")
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "null": None}


def split_pipeline(text: str) -> list[tuple[str, dict[str, Scalar]]]:
    """Return unvalidated names and options; raise FXP109 with the column of a syntax error."""
    return _PipelineTextReader(text).pipeline()


def parse_pipeline(text: str, table: Mapping[str, type[Any]]) -> tuple[Any, ...]:
    """Return the passes that the text names; raise FXP109 with every wrong name and option."""
    problems: list[Problem] = []
    passes = []
    for position, (name, options) in enumerate(split_pipeline(text)):
        where = f"pass {position + 1} of the pipeline, {name!r}"
        if name not in table:
            problems.append(_unknown(where, "pass", name, sorted(table)))
            continue
        found = _option_problems(where, table[name], options)
        problems.extend(found)
        if not found:
            passes.append(table[name](**options))
    if problems:
        raise FxpartError(problems)
    return tuple(passes)


def format_pipeline(passes: Sequence[Any]) -> str:
    """Return the text that :func:`parse_pipeline` turns into equal passes."""
    return ",".join(_format_one(p) for p in passes)


def _format_one(item: Any) -> str:
    """Return one pass with the options that differ from their defaults."""
    parts = [
        f"{f.name}={json.dumps(getattr(item, f.name))}"
        for f in option_fields(type(item))
        if f.default is MISSING or getattr(item, f.name) != f.default
    ]
    return f"{item.name}{{{','.join(parts)}}}" if parts else str(item.name)


def option_fields(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields of a pass class that are options."""
    return [f for f in fields(kind) if f.init]


def _option_problems(where: str, kind: type[Any], options: dict[str, Scalar]) -> list[Problem]:
    """Return all problems with the options of one pass: unknown, missing or of the wrong type."""
    known = {f.name: f for f in option_fields(kind)}
    hints = get_type_hints(kind)
    problems = [_unknown(where, "option", key, list(known)) for key in options if key not in known]
    for name, field in known.items():
        if name not in options:
            if field.default is MISSING and field.default_factory is MISSING:
                problems.append(
                    Problem("FXP109", where, f"the option {name} is missing", f"add {{{name}=...}}")
                )
        elif not _fits(options[name], hints[name]):
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            why = f"{name}={json.dumps(options[name])} is not of type {wanted}"
            fix = f"set {name} to a value of type {wanted}"
            problems.append(Problem("FXP109", where, why, fix))
    return problems


def _fits(value: Scalar, hint: Any) -> bool:
    """Return whether a value has the annotated type; a bool is not an int, an int is a float."""
    kinds = get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return type(value) in kinds


def _unknown(where: str, what: str, name: str, known: Sequence[str]) -> Problem:
    """Report an unknown name, with the closest known name and the whole list."""
    near = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}? " if near else ""
    listed = ", ".join(known) if known else "none"
    return Problem("FXP109", where, f"unknown {what} {name!r}", f"{fix}known: {listed}")


class _PipelineTextReader:
    """Parser of pipeline text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def pipeline(self) -> list[tuple[str, dict[str, Scalar]]]:
        """Parse comma-separated passes with optional {options}; empty text is an empty pipeline."""
        result: list[tuple[str, dict[str, Scalar]]] = []
        self.space()
        while self.at < len(self.text):
            if result:
                self.expect(",")
            name = self.match(_NAME, "the name of a pass")
            result.append((name, self.options() if self.take("{") else {}))
            self.space()
        return result

    def options(self) -> dict[str, Scalar]:
        """Parse key=value, ... up to the closing brace."""
        result: dict[str, Scalar] = {}
        while not self.take("}"):
            if result:
                self.expect(",")
            key = self.match(_NAME, "the name of an option")
            if key in result:
                raise self.wrong(f"an option other than {key!r}, which is a duplicate")
            self.expect("=")
            result[key] = self.value()
        return result

    def value(self) -> Scalar:
        """Parse a JSON scalar, or a bare word as text."""
        self.space()
        if self.text.startswith('"', self.at):
            try:
                found, end = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError as cause:
                raise self.wrong("a closed string") from cause
            self.at = end
            return str(found)
        word = self.match(_BARE, "a value")
        if word in _WORDS:
            return _WORDS[word]
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                continue
        return word

    def space(self) -> None:
        """Skip white space."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def take(self, mark: str) -> bool:
        """Skip the mark if it comes next; return whether it did."""
        self.space()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Skip the mark, or raise FXP109 if it is missing."""
        if not self.take(mark):
            raise self.wrong(repr(mark))

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        """Skip and return the pattern's match, or raise FXP109 if it is missing."""
        self.space()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.wrong(what)
        self.at = found.end()
        return found.group()

    def wrong(self, wanted: str) -> FxpartError:
        """Return FXP109 at the current column."""
        following = self.text[self.at : self.at + 20]
        where = f"pipeline text, column {self.at + 1}"
        found = repr(following) if following else "the end"
        why = f"expected {wanted}, found {found}"
        fix = 'example of a pipeline: drop_asserts,group_blocks{max_blocks=64,granularity="op"}'
        return FxpartError(Problem("FXP109", where, why, fix))
