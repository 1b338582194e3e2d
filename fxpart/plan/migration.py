"""Older plan files: one function for each version, from it to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpart.errors import error

VERSION = 9  # of the plans that this version writes

Step = Callable[[dict[str, Any]], dict[str, Any]]


def _one(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 2 can say how the ranks of a stage share its work; in version 1 a stage is one."""
    return raw


def _two(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 3 says equal ranks once, and of each stage its ZeRO level.

    Until then each rank was predicted by itself with the name of its device, and what a stage of
    one rank summed up once a step were shared parameters.
    """
    given = raw.get("sharding")
    if isinstance(given, dict):
        for stage in _dicts(raw.get("stages")):
            stage["zero"] = given.get("zero", 0)
    prediction = raw.get("prediction")
    if isinstance(prediction, dict) and isinstance(prediction.get("ranks"), list):
        for entry in _dicts(prediction["ranks"]):
            if given is None and "sync_seconds" in entry:
                entry["tie_seconds"], entry["sync_seconds"] = entry["sync_seconds"], 0.0
        prediction["ranks"] = _merged(prediction["ranks"], _names(raw))
    return raw


def _three(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 4 can say how ranks of a host slow each other down, and the runtime's own seconds.

    In version 3 all ranks were taken to compute all the time; nothing else is known of it.
    """
    return raw


def _four(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 5 can say more schedules, found ones too, and precisions; edges of pieces."""
    return raw


def _five(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 6 can say more weight modes, and what they hold, cost and leave out.

    In version 5 the copies of the mode "stash" were among the weights' bytes, where they stay.
    """
    return raw


def _six(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 7 can say that stages are copies of one another; in version 6 none is."""
    return raw


def _seven(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 8 can say that microbatches come from queues; until then copies take turns."""
    return raw


def _eight(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 9 records the equivalence with single-process training and the module check."""
    return raw


def _merged(entries: list[Any], names: list[Any]) -> list[Any]:
    """Ranks that follow each other and are alike as one entry; what is odd stays to be refused."""
    found: list[Any] = []
    for entry in entries:
        if not isinstance(entry, dict) or type(entry.get("rank")) is not int:
            found.append(entry)
            continue
        rank = entry.pop("rank")
        if 0 <= rank < len(names) and entry.get("device") == names[rank]:
            del entry["device"]
        last = found[-1] if found else None
        if isinstance(last, dict) and "ranks" in last and last["ranks"][-1] + 1 == rank:
            if {**entry, "ranks": last["ranks"]} == last:
                last["ranks"].append(rank)
                continue
        found.append({**entry, "ranks": [rank]})
    return found


def _names(raw: dict[str, Any]) -> list[Any]:
    """The devices' names by rank."""
    cluster = raw.get("cluster")
    devices = cluster.get("devices") if isinstance(cluster, dict) else None
    return [d.get("name") if isinstance(d, dict) else None for d in _list(devices)]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# version -> the function that makes a plan of version + 1 of it (on plain dicts and lists).
MIGRATIONS: dict[int, Step] = {
    1: _one, 2: _two, 3: _three, 4: _four, 5: _five, 6: _six, 7: _seven, 8: _eight,
}  # fmt: skip


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
