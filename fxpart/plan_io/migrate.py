"""Older plan files: one function for each version, from it to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpart.errors import error
from fxpart.plan import VERSION

Step = Callable[[dict[str, Any]], dict[str, Any]]


def _one(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 2 can say how the ranks of a stage share its work; in version 1 a stage is one."""
    return raw


# version -> the function that makes a plan of version + 1 of it (on plain dicts and lists).
MIGRATIONS: dict[int, Step] = {1: _one}


def upgrade(
    raw: dict[str, Any],
    version: int,
    where: str,
    *,
    steps: dict[int, Step] = MIGRATIONS,
    target: int = VERSION,
) -> dict[str, Any]:
    """``raw`` brought from ``version`` to ``target``; FXP302 where no way leads there."""
    if version > target:
        raise error(
            "FXP302",
            where=where,
            why=f"it has version {version}; this fxpart reads up to {target}",
            fix="update fxpart, or make the plan again with this one",
        )
    while version < target:
        if version not in steps:
            raise error(
                "FXP302",
                where=where,
                why=f"it has version {version}, which is no longer read",
                fix="make the plan again with `fxpart plan`",
            )
        raw = steps[version](raw)
        version += 1
        raw["version"] = version
    return raw
