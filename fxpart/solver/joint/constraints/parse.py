"""Constraints as text: fixed values, forbidden values, or stages of blocks.

fix     tp=2   tp=1|2   dp=2,4   pp=4   microbatches=8   schedule=1f1b   zero=0,1   recompute=none
forbid  recompute   tp   zero=3   schedule=gpipe   pp=1   cut=layers.5
stage   layers.0-11=0   lm_head=-1
layout  Et*3|(tt|)*2L
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fxpart.errors import FxpartError, Problem, error
from fxpart.plan.constraint_table import CONSTRAINTS, DECISIONS, get_decision, suggest_names

Kind = Literal["fix", "forbid", "stage", "layout"]

CUT = "cut"  # can be forbidden like a decision: a boundary between stages
STAGE = "|"  # separates the tensor degrees of stages
LIST = ";"  # separates several entries in one constraint


@dataclass(frozen=True)
class PlanConstraint:
    """One constraint. key: a decision, "cut", or a pattern of blocks; values: as text.

    by_stage: whether the values are those of the stages in order, instead of alternatives.
    """

    kind: Kind
    key: str
    values: tuple[str, ...]
    by_stage: bool = False

    def __str__(self) -> str:
        words = (STAGE if self.by_stage else ",").join(self.values)
        body = {"layout": words, "forbid": self.key}.get(self.kind, f"{self.key}={words}")
        return f"{self.kind} {body}" + (f"={words}" if self.kind == "forbid" and words else "")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the values as numbers."""
        return tuple(int(v) for v in self.values)


def parse_constraint(kind: Kind, text: str) -> PlanConstraint:
    """Return one constraint from its text; raise FXP109."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if kind == "layout":
        return PlanConstraint(kind, "", (text.strip(),))
    if kind == "stage":
        if not key or not _whole(value):
            raise _wrong(kind, text, "The constraint needs blocks and a stage.", "layers.0-11=0")
        return PlanConstraint(kind, key, (str(int(value)),))
    by_stage = kind == "fix" and key in ("tp", "tensor") and STAGE in value
    parts = value.split(STAGE if by_stage else ",")
    values = tuple(part.strip() for part in parts) if equals else ()
    if kind == "forbid" and key == CUT:
        if not value:
            raise _wrong(kind, text, "The cut is missing.", "cut=layers.5")
        return PlanConstraint(kind, key, (value,))
    spec = get_decision(key)
    if spec is None:
        known = suggest_names(key, (*DECISIONS, *((CUT,) if kind == "forbid" else ())))
        raise _wrong(kind, text, f"Unknown decision {key!r}.", known)
    key = spec.name
    if not equals and (kind == "fix" or not spec.plain):
        raise _wrong(kind, text, "The value is missing.", f"{key}=...")
    for one in values:
        if spec.kind == "words" and not spec.accepts(one):
            choices = ", ".join(map(str, spec.list_choices()))
            raise _wrong(kind, text, f"Unknown value {one!r}.", choices)
        if spec.kind == "numbers" and (not _whole(one) or int(one) < spec.least or len(one) > 9):
            raise _wrong(kind, text, f"{one!r} is not a whole number.", f"{key}=2")
    return PlanConstraint(kind, key, values, by_stage)


def parse_constraints(constraints: Mapping[str, object]) -> tuple[PlanConstraint, ...]:
    """Return the solver constraints among a plan's constraints, in a fixed order; raise FXP109.

    Decisions have their own names (``tp``: 2 or "2,4"); ``forbid``, ``stage`` and ``layout`` are
    texts, with several entries separated by ";".
    """
    texts: list[tuple[Kind, str]] = []
    for key, value in sorted(constraints.items()):
        if get_decision(key) is not None:
            texts.append(("fix", f"{key}={value}"))
        elif key in CONSTRAINTS and CONSTRAINTS[key].kind == "entries":
            kind: Kind = key  # type: ignore[assignment]
            texts += [(kind, text) for text in str(value).split(LIST) if text.strip()]
    found: list[PlanConstraint] = []
    problems: list[Problem] = []
    for kind, text in texts:
        try:
            found.append(parse_constraint(kind, text))
        except FxpartError as fault:
            problems += fault.problems
    if problems:
        raise FxpartError(problems)
    return tuple(found)


def find_constraint_problems(constraints: Mapping[str, object]) -> list[Problem]:
    """Return the problems of the solver constraints among the constraints."""
    try:
        parse_constraints(constraints)
    except FxpartError as fault:
        return list(fault.problems)
    return []


def _whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 10


def _wrong(kind: str, text: str, why: str, fix: str) -> FxpartError:
    return error("FXP109", where=f"{kind} {text[:80]!r}", why=why, fix=f"Use {fix}.")
