"""Compare two plans field by field."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from fxpart.plan.files import plain
from fxpart.plan.model import Plan

Kind = Literal["given", "decision", "prediction"]
_GIVEN = {"format", "version", "model", "cluster", "cluster_hash", "constraints", "seed",
          "batch_size", "optimizer", "provenance"}  # fmt: skip
_PREDICTED = {"prediction", "certificate", "alternatives", "changes"}
_ORDER: tuple[Kind, ...] = ("given", "decision", "prediction")


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """One difference: the field's path, and both values (None where the field is missing).

    kind: whether the field was given to the planner, decided, or predicted.
    """

    kind: Kind
    path: str
    old: Any
    new: Any


def diff(old: Plan, new: Plan) -> tuple[PlanChange, ...]:
    """Return every leaf that differs: first given, then decided, then predicted; in field order."""
    found = _walk(plain(old), plain(new), "")
    return tuple(sorted(found, key=lambda change: _ORDER.index(change.kind)))


def _kind(path: str) -> Kind:
    top = re.split(r"[.\[]", path)[0]
    return "given" if top in _GIVEN else "prediction" if top in _PREDICTED else "decision"


def _walk(old: Any, new: Any, path: str) -> list[PlanChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        pairs = [(f"{path}.{key}" if path else key, old.get(key), new.get(key)) for key in keys]
    elif _is_list(old) and _is_list(new):
        count = max(len(old), len(new))
        pairs = [(f"{path}[{i}]", _at(old, i), _at(new, i)) for i in range(count)]
    else:
        # 0 and 0.0 are the same number in a plan; True and 1 are not the same setting.
        same = isinstance(old, bool) is isinstance(new, bool) and old == new
        return [] if same else [PlanChange(kind=_kind(path), path=path, old=old, new=new)]
    return [change for where, a, b in pairs for change in _walk(a, b, where)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _at(items: Any, index: int) -> Any:
    return items[index] if index < len(items) else None
