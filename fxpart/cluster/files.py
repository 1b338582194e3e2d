"""Read and write cluster files in TOML and JSON; the canonical digest of a cluster.

A file may have unknown keys at every level. They are stored in ``extra`` and written back at the
same place.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.errors import FxpartError, error
from fxpart.files import from_json, read_bytes, toml
from fxpart.units import parse_bandwidth, parse_rate, parse_seconds, parse_size

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster

MAX_BYTES = 64 << 20
SUFFIXES = (".toml", ".json")


def load(kind: type[Cluster], path: Path) -> Cluster:
    """Load and validate a cluster; FXP401 if it cannot be read, FXP402 if it is not valid."""
    _suffix(path)
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as why:
        raise _unreadable(
            path, why.strerror or str(why), "give the path of a readable file"
        ) from why
    return decode(kind, data, path.suffix, str(path))


def decode(kind: type[Cluster], data: bytes, suffix: str, where: str = "cluster") -> Cluster:
    """Parse and validate the text ``data`` in the format ".toml" or ".json"."""
    try:
        if suffix == ".json":
            raw = from_json(data)
        else:
            raw = toml(data.decode("utf-8"))
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as why:
        # Both parsers raise subclasses of ValueError; deep nesting and huge integers do not.
        raise _unreadable(where, str(why) or type(why).__name__) from why
    return from_builtins(kind, raw, where)


def from_builtins(kind: type[Cluster], raw: Any, where: str = "cluster") -> Cluster:
    """Convert and validate the result of a JSON or TOML parser; FXP401 or FXP402."""
    try:
        cluster = msgspec.convert(_with_plain_numbers(_separate_unknown_keys(raw, kind)), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as why:
        raise _unreadable(where, str(why) or type(why).__name__) from why
    return cluster.validate()


def to_builtins(cluster: Cluster) -> dict[str, Any]:
    """Return the content of a cluster file as dicts, lists and numbers, unknown keys included."""
    made = _fields(cluster)
    for kind in _list_fields():
        if kind in made:
            made[kind] = [_fields(item) for item in made[kind]]
    result: dict[str, Any] = _tuples_to_lists(made)
    return result


def dump(cluster: Cluster, path: Path) -> None:
    """Write ``cluster`` as TOML or JSON by the suffix of ``path``; FXP603 if that fails."""
    text = to_toml(cluster) if _suffix(path) == ".toml" else to_json(cluster)
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as why:
        raise error(
            "FXP603", where=str(path), why=why.strerror or str(why), fix="give a writable path"
        ) from why


def to_json(cluster: Cluster) -> str:
    """Return indented JSON with sorted keys and a final newline."""
    text = msgspec.json.encode(to_builtins(cluster), order="sorted")
    return msgspec.json.format(text, indent=2).decode() + "\n"


def to_toml(cluster: Cluster) -> str:
    """Return TOML: fields of the cluster, then one table per host, device and link.

    Raises FXP603 if the value of an unknown key is null, which TOML cannot represent.
    """
    made = to_builtins(cluster)
    tables = {kind: made.pop(kind) for kind in _list_fields() if made.get(kind)}
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in made.items()]
    for kind, items in tables.items():
        for item in items:
            lines += ["", f"[[{kind}]]"]
            lines += [f"{_key(key)} = {_toml(value)}" for key, value in item.items()]
    return "\n".join(lines) + "\n"


def digest(cluster: Cluster) -> str:
    """Return the SHA-256 in hex of the canonical JSON: sorted keys, no spaces."""
    return hashlib.sha256(msgspec.json.encode(cluster, order="sorted")).hexdigest()


def _list_fields() -> dict[str, type[msgspec.Struct]]:
    """Return the list fields of a cluster in file order, with the types of their items."""
    return {"hosts": Host, "devices": Device, "links": Link, "collectives": CollectiveCurve}


# By list and field, how a text with a unit is read.
_UNITS: dict[str, dict[str, Callable[[str], float | None]]] = {
    "devices": {
        "memory": parse_size, "bandwidth": parse_bandwidth, "flops": parse_rate,
        "launch": parse_seconds, "host_bandwidth": parse_bandwidth,
    },
    "hosts": {"memory": parse_size},
    "links": {"latency": parse_seconds, "bandwidth": parse_bandwidth},
}  # fmt: skip


def _with_plain_numbers(raw: Any) -> Any:
    """Replace quantities with units ("80GB", "400Gbit/s", "5us") by numbers in bytes and seconds.

    A number of bytes may be written as 80e9. What cannot be read stays as it is, so that the
    conversion reports it.
    """
    if not isinstance(raw, dict):
        return raw
    made = dict(raw)
    for name, readers in _UNITS.items():
        if isinstance(raw.get(name), list):
            made[name] = [_read_units(item, readers) for item in raw[name]]
    return made


def _read_units(item: Any, readers: dict[str, Callable[[str], float | None]]) -> Any:
    """Return a device or link with its quantities as numbers."""
    if not isinstance(item, dict):
        return item
    made = {key: _number(item[key], readers[key]) for key in readers.keys() & item.keys()}
    memory = made.get("memory")
    if isinstance(memory, float) and memory.is_integer():
        made["memory"] = int(memory)
    return {key: made.get(key, value) for key, value in item.items()}


def _number(value: Any, read: Callable[[str], float | None]) -> Any:
    """Return the number of a text with a unit; for a table, of each of its entries."""
    if isinstance(value, dict):
        return {key: _number(entry, read) for key, entry in value.items()}
    found = read(value) if isinstance(value, str) else None
    return value if found is None else found


def _separate_unknown_keys(raw: Any, kind: type[msgspec.Struct]) -> Any:
    """Move keys that ``kind`` does not have to ``extra``."""
    if not isinstance(raw, dict):
        return raw  # The conversion reports the error.
    known = set(kind.__struct_fields__) - {"extra"}
    made = {key: value for key, value in raw.items() if key in known}
    if len(made) < len(raw):
        made["extra"] = {key: value for key, value in raw.items() if key not in known}
    if "links" in known:
        for name, part in _list_fields().items():
            if isinstance(made.get(name), list):
                made[name] = [_separate_unknown_keys(item, part) for item in made[name]]
    return made


def _fields(item: msgspec.Struct) -> dict[str, Any]:
    """Return the set fields and the unknown keys of a struct by name."""
    fields = {k: getattr(item, k) for k in item.__struct_fields__}
    extra = fields.pop("extra", msgspec.UNSET)
    given = {key: value for key, value in fields.items() if value is not msgspec.UNSET}
    return given if extra is msgspec.UNSET else {**extra, **given}


def _tuples_to_lists(value: Any) -> Any:
    """Return the value with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(entry) for key, entry in value.items()}
    return (
        [_tuples_to_lists(entry) for entry in value] if isinstance(value, list | tuple) else value
    )


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _key(key: str) -> str:
    """Return a TOML key, bare if possible."""
    return key if _BARE.fullmatch(key) else _toml(key)


def _toml(value: Any) -> str:
    """Return a TOML value: string, number, boolean, date, or array or inline table of these."""
    if isinstance(value, str):
        # JSON's escapes of control characters are TOML's too; DEL alone needs one more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if value is None:
        why = "the value of an unknown key is null, which TOML cannot represent"
        raise error("FXP603", where="TOML", why=why, fix="write the cluster as .json")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        fix = "use a file name with suffix .toml or .json"
        raise _unreadable(path, f"the suffix {path.suffix!r} is unknown", fix)
    return path.suffix


def _unreadable(where: str | Path, why: str, fix: str = "") -> FxpartError:
    fix = fix or "compare it with a file that `fxpart cluster detect -o FILE` writes"
    return error("FXP401", where=str(where), why=why, fix=fix)
