"""Migrate older plan files: one function for each version, to the next version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpart.errors import error

VERSION = 10  # of the plans that this fxpart writes

Step = Callable[[dict[str, Any]], dict[str, Any]]


def _one(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 2 adds sharding within a stage; in version 1 a stage is one rank."""
    return raw


def _two(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 3 merges equal ranks into one entry, and adds the ZeRO level of each stage.

    Before, each rank had an entry with the name of its device, and the reductions per step of a
    stage of one rank were those of tied parameters.
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
    """Version 4 adds contention between ranks of a host, and the runtime's overhead.

    In version 3 all ranks were assumed to compute all the time.
    """
    return raw


def _four(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 5 adds schedules (also searched ones), precisions, and edges of virtual stages."""
    return raw


def _five(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 6 adds weight modes, and their memory, time and staleness.

    In version 5 the copies of the mode "stash" were among the bytes of weights, where they stay.
    """
    return raw


def _six(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 7 adds replicated stages."""
    return raw


def _seven(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 8 adds queues; before, replicas used round-robin routing only."""
    return raw


def _eight(raw: dict[str, Any]) -> dict[str, Any]:
    """Version 9 records the equivalence with single-process training and the module check."""
    return raw


def _merged(entries: list[Any], names: list[Any]) -> list[Any]:
    """Merge adjacent equal ranks into one entry; invalid entries are kept and rejected later."""
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
    """Return the devices' names by rank."""
    cluster = raw.get("cluster")
    devices = cluster.get("devices") if isinstance(cluster, dict) else None
    return [d.get("name") if isinstance(d, dict) else None for d in _list(devices)]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# version -> the function that migrates plain dicts and lists to version + 1.
MIGRATIONS: dict[int, Step] = {
    1: _one, 2: _two, 3: _three, 4: _four, 5: _five, 6: _six, 7: _seven, 8: _eight, 9: dict,
}  # fmt: skip


def upgrade(
    raw: dict[str, Any],
    version: int,
    where: str,
    *,
    steps: dict[int, Step] = MIGRATIONS,
    target: int = VERSION,
) -> dict[str, Any]:
    """Migrate ``raw`` from ``version`` to ``target``; raises FXP302 where that is not possible."""
    if version > target:
        raise error(
            "FXP302",
            where=where,
            why=f"the plan has version {version}, but this fxpart reads versions up to {target}",
            fix="update fxpart, or plan again with this one",
        )
    while version < target:
        if version not in steps:
            raise error(
                "FXP302",
                where=where,
                why=f"the plan has version {version}, which this fxpart does not read any more",
                fix="plan again with `fxpart plan`",
            )
        raw = steps[version](raw)
        version += 1
        raw["version"] = version
    return raw
