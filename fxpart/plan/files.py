"""Read and write plan files: canonical JSON, validated.

Readers take the class of a plan, so that this module does not import the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.files import check_unique_keys, read_bytes
from fxpart.plan.json_shape import shape_problems
from fxpart.plan.migration import VERSION, upgrade
from fxpart.plan.number_ranges import FIELDS, PATTERN, lengthen, shorten
from fxpart.schedule.spec import list_schedules
from fxpart.schedule.weight_modes import FLUSH, MODES

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

_STRUCT_OF_FIELD = {
    "devices": "Plan",
    "order": "Plan",
    "stages[].ranks": "Stage",
    "prediction.ranks[].ranks": "RankPrediction",
    "prediction.hosts[].ranks": "HostLoad",
}

MAX_BYTES = 64 << 20


class _Header(msgspec.Struct):
    """The fields that are read first, whatever the other fields are."""

    format: Any = None
    version: Any = None


def load(kind: type[Plan], path: Path) -> Plan:
    """Return the checked plan in ``path``."""
    where = str(path)
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as why:
        text = why.strerror or str(why)
        raise _unreadable(where, text, "give the path of a plan file") from why
    return decode(kind, data, where)


def decode(kind: type[Plan], data: bytes, where: str) -> Plan:
    """Return the checked plan in ``data``; raises all faults of shape, or else of content."""
    raw: Any = None
    try:
        header = _header(data, where)
        if header.format != "fxpart-plan" or type(header.version) is not int:
            raise _unknown(where, f"the format is {_short(header.format)}")
        check_unique_keys(data)
        raw = lengthen(upgrade(msgspec.json.decode(data), header.version, where))
        plan = msgspec.convert(raw, kind)
    except msgspec.ValidationError as first:
        found = shape_problems(raw, kind, where)
        whole = error("FXP303", where=where, why=str(first), fix=_FIX).problems
        raise FxpartError(found or whole) from first
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as why:
        # Not JSON, not UTF-8, nested too deep, or a number that Python cannot represent.
        raise _unreadable(where, str(why) or type(why).__name__) from why
    return plan.validate()


def _header(data: bytes, where: str) -> _Header:
    try:
        return msgspec.json.decode(data, type=_Header)
    except msgspec.ValidationError as why:
        raise _unknown(where, "the file has JSON that is not an object") from why


def encode(plan: Plan) -> str:
    """Return canonical JSON text."""
    text = msgspec.json.encode(plan)
    try:
        # Decode once, so that an int in a float field is written as it is read.
        plan = msgspec.json.decode(text, type=type(plan))
    except msgspec.ValidationError:
        plan.validate()  # NaN and infinity become null; this raises with their paths
        raise
    short = msgspec.json.encode(plain(plan), order="sorted")
    return msgspec.json.format(short, indent=2).decode() + "\n"


def plain(plan: Plan) -> dict[str, Any]:
    """Return the plan as dicts, lists, strings and numbers, as in its file."""
    found = shorten(msgspec.to_builtins(plan))
    for stage in found["stages"]:
        for name, default in _OMITTED.items():
            if stage[name] == default:
                del stage[name]
    if not found["modes"]:
        del found["modes"]
    if found["offload"] == "none":
        del found["offload"]
    for entry in found["prediction"]["ranks"]:
        if not entry["host"]:
            del entry["host"]
    return found


# Fields of stages that are written only where they differ: most plans have no such axis.
_OMITTED = {"context_parallel": 1, "shard_degree": 0}


def dump(plan: Plan, path: Path) -> None:
    """Check the plan, write a temporary file and rename it, so that readers see whole plans."""
    text = encode(plan.validate())
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    except OSError as why:
        text = why.strerror or str(why)
        raise error("FXP603", where=str(path), why=text, fix="give a writable path") from why


_FIX = "plan again with `fxpart plan`, or correct this field"


def _unreadable(where: str, why: str, fix: str = "") -> FxpartError:
    fix = fix or "plan again with `fxpart plan`"
    return error("FXP301", where=where, why=why, fix=fix)


def _unknown(where: str, why: str) -> FxpartError:
    fix = "a plan file has the format fxpart-plan and a version; `fxpart plan` writes one"
    return error("FXP302", where=where, why=why, fix=fix)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a plan's JSON Schema (2020-12).

    ``Plan.problems`` checks what it cannot express (sums, references).
    """
    (reference,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for field in FIELDS:
        _runs(components[_STRUCT_OF_FIELD[field]]["properties"][field.rpartition(".")[2]])
    fields = components["Plan"]["properties"]
    fields["schedule"] = {"enum": sorted(list_schedules(trains=True))}
    fields["weights"] = {"enum": sorted(MODES), "default": FLUSH}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fxpart plan, version {VERSION}",
        **reference,
        "$defs": components,
    }


def _runs(field: dict[str, Any]) -> None:
    """Allow lists besides number ranges, as in memory."""
    numbers = {"type": field.pop("type"), "items": field.pop("items")}
    field.pop("default", None)
    field["anyOf"] = [{"type": "string", "pattern": f"^{PATTERN}$"}, numbers]
