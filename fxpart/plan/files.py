"""Plan files: canonical JSON, read without trusting them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.files import read_bytes
from fxpart.plan.json_shape import shape_problems
from fxpart.plan.migration import upgrade
from fxpart.plan.model import Plan
from fxpart.plan.number_ranges import lengthen, shorten

MAX_BYTES = 64 << 20


class _Header(msgspec.Struct):
    """What is read first, whatever the rest is."""

    format: Any = None
    version: Any = None


def load(path: Path) -> Plan:
    """The checked plan in ``path``."""
    where = str(path)
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as why:
        text = why.strerror or str(why)
        raise _unreadable(where, text, "give the path of a plan file") from why
    return decode(data, where)


def decode(data: bytes, where: str) -> Plan:
    """The checked plan in ``data``; every fault of shape, or else every fault of content."""
    raw: Any = None
    try:
        header = _header(data, where)
        if header.format != "fxpart-plan" or type(header.version) is not int:
            raise _unknown(where, f"it says format {_short(header.format)}")
        raw = lengthen(upgrade(msgspec.json.decode(data), header.version, where))
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as first:
        found = shape_problems(raw, Plan, where)
        whole = error("FXP303", where=where, why=str(first), fix=_FIX).problems
        raise FxpartError(found or whole) from first
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as why:
        # Not JSON, not UTF-8, nested too deep, or a number that Python cannot hold.
        raise _unreadable(where, str(why) or type(why).__name__) from why
    return plan.validate()


def _header(data: bytes, where: str) -> _Header:
    try:
        return msgspec.json.decode(data, type=_Header)
    except msgspec.ValidationError as why:
        raise _unknown(where, "it is JSON, but no object") from why


def encode(plan: Plan) -> str:
    """Canonical JSON text."""
    text = msgspec.json.encode(plan)
    try:
        # Once through the reader, so that an int in a float field is written as it is read.
        plan = msgspec.json.decode(text, type=Plan)
    except msgspec.ValidationError:
        plan.validate()  # NaN and infinity become null: this names them
        raise
    short = msgspec.json.encode(plain(plan), order="sorted")
    return msgspec.json.format(short, indent=2).decode() + "\n"


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, texts and numbers, as its file holds them."""
    return shorten(msgspec.to_builtins(plan))


def dump(plan: Plan, path: Path) -> None:
    """Check and write beside, then rename: a reader never sees half a plan."""
    text = encode(plan.validate())
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    except OSError as why:
        text = why.strerror or str(why)
        raise error("FXP603", where=str(path), why=text, fix="give a writable path") from why


_FIX = "make the plan again with `fxpart plan`, or correct this place"


def _unreadable(where: str, why: str, fix: str = "") -> FxpartError:
    fix = fix or "make the plan again with `fxpart plan`"
    return error("FXP301", where=where, why=why, fix=fix)


def _unknown(where: str, why: str) -> FxpartError:
    fix = "a plan starts with format fxpart-plan and a version; `fxpart plan` writes one"
    return error("FXP302", where=where, why=why, fix=fix)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
