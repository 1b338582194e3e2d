"""Parameter groups by original name: each parameter in one group, equal on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from fxpart.errors import FxpartError, Problem, error

Shapes = Mapping[str, tuple[int, ...]]
Groups = Sequence[Mapping[str, Any]] | Callable[..., Mapping[str, Any] | None]


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of the whole model: its options, and its parameters by name."""

    options: Mapping[str, Any]
    names: tuple[str, ...]

    def label(self, index: int) -> str:
        """Return its name, or its index."""
        return str(self.options.get("name", index))


def assign_groups(given: Groups, shapes: Shapes) -> tuple[ParameterGroup, ...]:
    """Assign each parameter to a group.

    given: dicts as for torch's optimizers, with fnmatch patterns of names as ``params`` ("*.bias",
    or several); at most one dict without ``params`` gets all other parameters. Or a function (name)
    or (name, shape) -> options; parameters with equal options share a group, and None means the
    optimizer's own options. Parameters that match no group form a last group with the optimizer's
    own options. shapes: of the whole trainable parameters, in the model's order.

    Raises FXP109 with every problem: a pattern without a match, a parameter in two groups, a group
    that is not a dict.
    """
    if callable(given):
        return _assign_by_function(given, shapes)
    problems: list[Problem] = []
    named = [_read_patterns(entry, index, problems) for index, entry in enumerate(given)]
    rest = [index for index, patterns in enumerate(named) if patterns is None]
    if len(rest) > 1:
        fix = "leave params out of at most one group"
        problems.append(_make_problem(f"groups {rest}", "several groups have no params", fix))
    if problems:
        raise FxpartError(problems)
    taken: dict[str, int] = {}
    members: list[list[str]] = [[] for _ in given]
    for index, patterns in enumerate(named):
        for pattern in patterns or ():
            found = [name for name in shapes if fnmatchcase(name, pattern)]
            if not found:
                problems.append(_make_unmatched_problem(index, pattern, shapes))
            for name in found:
                if taken.setdefault(name, index) != index:
                    why = f"{name} is also in group {taken[name]}"
                    fix = "use patterns that do not overlap"
                    problems.append(_make_problem(_format_place(index, pattern), why, fix))
        members[index] = [name for name in shapes if taken.get(name) == index]
    if problems:
        raise FxpartError(problems)
    others = [name for name in shapes if name not in taken]
    options = [{k: v for k, v in entry.items() if k != "params"} for entry in given]
    if rest:
        members[rest[0]] = others
    elif others:
        options.append({})
        members.append(others)
    return tuple(ParameterGroup(o, tuple(m)) for o, m in zip(options, members, strict=True))


def make_local_groups(
    groups: Sequence[ParameterGroup], parameters: Iterable[tuple[str, torch.Tensor]]
) -> list[dict[str, Any]]:
    """Return the groups with this process's parameters, in the format of torch's optimizers.

    Includes groups without parameters here, so that learning-rate schedulers see the same groups on
    every rank. Parameters in no group are not trained.
    """
    place = {name: index for index, group in enumerate(groups) for name in group.names}
    made: list[dict[str, Any]] = [{**group.options, "params": []} for group in groups]
    for name, parameter in parameters if groups else ():
        if name in place:
            made[place[name]]["params"].append(parameter)
    return made


def no_decay(
    weight_decay: float = 0.01, *, skip: Iterable[str] = ()
) -> Callable[[str, tuple[int, ...]], Mapping[str, Any]]:
    """Return groups without weight decay for vectors and scalars (biases, norms).

    weight_decay: of all other parameters. skip: fnmatch patterns of further names without decay,
    such as "*embed*".
    """
    patterns = tuple(skip)

    def options(name: str, shape: tuple[int, ...]) -> Mapping[str, Any]:
        if len(shape) < 2 or any(fnmatchcase(name, pattern) for pattern in patterns):
            return {"name": "no_decay", "weight_decay": 0.0}
        return {"name": "decay", "weight_decay": weight_decay}

    return options


def _assign_by_function(given: Callable[..., Any], shapes: Shapes) -> tuple[ParameterGroup, ...]:
    both = _takes_two_arguments(given)
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name, shape in shapes.items():
        options = given(name, shape) if both else given(name)
        if options is not None and not isinstance(options, Mapping):
            raise error(
                "FXP109", where=f"groups({name!r})", why=f"it returned {options!r}",
                fix="return a dict of options, or None for the optimizer's own",
            )  # fmt: skip
        mine = dict(options or {})
        members = next((m for known, m in found if known == mine), None)
        if members is None:
            found.append((mine, members := []))
        members.append(name)
    return tuple(ParameterGroup(options, tuple(names)) for options, names in found)


def _takes_two_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in plain and p.default is p.empty]
    return len(required) == 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _read_patterns(entry: Any, index: int, problems: list[Problem]) -> tuple[str, ...] | None:
    """Return the patterns of one group; None if it gets all other parameters."""
    fix = 'use the form {"params": "*.bias", "weight_decay": 0.0}'
    if not isinstance(entry, Mapping):
        problems.append(
            _make_problem(f"group {index}", f"it is a {type(entry).__name__}, not a dict", fix)
        )
        return ()
    given = entry.get("params")
    if given is None:
        return None
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(pattern, str) for pattern in patterns):
        why = "its params are not names: each rank has only some of the model's parameters"
        problems.append(_make_problem(f"group {index}", why, fix))
        return ()
    return patterns


def _make_unmatched_problem(index: int, pattern: str, shapes: Shapes) -> Problem:
    some = ", ".join(list(shapes)[:4])
    more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    why = "no trainable parameter has a matching name"
    return _make_problem(
        _format_place(index, pattern), why, f"use a pattern for names such as {some}{more}"
    )


def _format_place(index: int, pattern: str) -> str:
    return f"group {index}, params {pattern!r}"


def _make_problem(where: str, why: str, fix: str) -> Problem:
    return Problem("FXP109", where, why, fix)
