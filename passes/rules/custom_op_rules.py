"""Rules of ops from outside fxpart: the checks of names, notations and calls."""

from __future__ import annotations

import re

from fxpart.errors import FxpartError, error, quoted

from .schema_call import Maker, SchemaCall, notation
from .sharding_rule import ShardingRule

_NAME = re.compile(r"([A-Za-z_]\w*)(?:::|\.)([A-Za-z_]\w*)")
_FACTOR = re.compile(r"[A-Za-z_]\w*|1|\.\.\.")


def normalize_name(op: str) -> str:
    """Return "mylib.op" for "mylib::op"; raise FXP109 for what is no name of an op."""
    found = _NAME.fullmatch(op) if isinstance(op, str) else None
    if found is None:
        raise error(
            "FXP109",
            where=f"op {quoted(op)}",
            why="This is not the name of an op without an overload.",
            fix='Write "library::op".',
        )
    return ".".join(found.groups())


def check_entry(name: str, entry: object) -> None:
    """Check the rule of an op from outside: a notation or a function; raise FXP109 otherwise."""
    normalize_name(name)
    if isinstance(entry, str):
        _terms(name, entry)
    elif not callable(entry):
        raise _wrong(name, "The rule is neither a notation nor a function.")


def make_checked_maker(name: str, text: str) -> Maker:
    """Return a maker from a notation that checks each call against it.

    The maker raises FXP109 where the numbers of tensors differ, and where two dims of one factor
    have different sizes; where a tensor has another number of dims, the call has no rule.
    """
    left, right = _terms(name, text)
    make = notation(text)

    def checked(call: SchemaCall) -> ShardingRule | None:
        for kind, terms, there in (
            ("tensor arguments", left, len(call.tensor_names)),
            ("results", right, len(call.results)),
        ):
            if len(terms) != there:
                raise _wrong(name, f"{text!r} has {len(terms)} {kind}, and the op has {there}.")
        rule = make(call)
        if rule is not None:
            _check_sizes(name, text, rule, call)
        return rule

    return checked


def _check_sizes(name: str, text: str, rule: ShardingRule, call: SchemaCall) -> None:
    """Check that every dim of a factor has the factor's size; broadcast dims carry none."""
    shapes = [*(shape for _, shape in call.operands), *call.results]
    for dims, shape in zip((*rule.operands, *rule.results), shapes, strict=True):
        for factors, size in zip(dims, shape, strict=True):
            for factor in factors:
                known = rule.sizes[factor]
                if isinstance(size, int) and isinstance(known, int) and size != known:
                    why = f"In {text!r} the factor {factor} has the sizes {known} and {size}."
                    raise _wrong(name, why)


def _terms(name: str, text: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the factors of each operand and each result; raise FXP109 for a wrong notation."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise _wrong(name, f"{quoted(text)} has no single '->' between operands and results.")
    sides = [[term.split() for term in side.split(",")] for side in (left, right)]
    for term in (*sides[0], *sides[1]):
        wrong = next((f for f in term if not _FACTOR.fullmatch(f)), None)
        if wrong is not None:
            raise _wrong(name, f"{quoted(wrong)} in {quoted(text)} is not the name of a factor.")
        twice = next((f for f in term if f != "1" and term.count(f) > 1), None)
        if twice is not None:
            raise _wrong(name, f"The factor {twice} names two dims of one tensor in {text!r}.")
    known = {factor for term in sides[0] for factor in term}
    new = next((f for term in sides[1] for f in term if f not in known and f != "1"), None)
    if new is not None and not new.startswith("_"):
        why = f"The factor {new} of a result in {text!r} is in no operand."
        raise _wrong(name, f"{why} It cannot be cut, so its name has to start with '_'.")
    return sides[0], sides[1]


def _wrong(name: str, why: str) -> FxpartError:
    return error(
        "FXP109",
        where=f"rule of the op {name}",
        why=why,
        fix='Write dims as factors, operands first: "b i, i o -> b o".',
    )
