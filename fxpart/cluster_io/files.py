"""Cluster files: TOML for people, JSON for machines, both ways; and the canonical digest."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.errors import FxpartError, error

if TYPE_CHECKING:
    from fxpart.cluster import Cluster

MAX_BYTES = 64 << 20
SUFFIXES = (".toml", ".json")


def load(path: Path) -> Cluster:
    """The checked cluster in ``path``; FXP401 where it cannot be read, FXP402 where it is wrong."""
    _suffix(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _unreadable(path, f"it has {size} bytes, more than {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as why:
        raise _unreadable(
            path, why.strerror or str(why), "give the path of a readable file"
        ) from why
    return decode(data, path.suffix, str(path))


def decode(data: bytes, suffix: str, where: str = "cluster") -> Cluster:
    """The checked cluster in the text ``data`` of the kind ".toml" or ".json"."""
    from fxpart.cluster import Cluster

    try:
        if suffix == ".json":
            cluster = msgspec.json.decode(data, type=Cluster)
        else:
            cluster = msgspec.convert(tomllib.loads(data.decode("utf-8")), Cluster)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as why:
        # Both parsers raise subclasses of ValueError; deep nesting and huge integers do not.
        raise _unreadable(where, str(why) or type(why).__name__) from why
    return cluster.validate()


def dump(cluster: Cluster, path: Path) -> None:
    """Write ``cluster`` as TOML or JSON by the suffix of ``path``; FXP603 where it cannot be."""
    text = to_toml(cluster) if _suffix(path) == ".toml" else to_json(cluster)
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as why:
        raise error(
            "FXP603", where=str(path), why=why.strerror or str(why), fix="give a writable path"
        ) from why


def to_json(cluster: Cluster) -> str:
    """The cluster as indented JSON with sorted keys and a final newline."""
    text = msgspec.json.encode(cluster, order="sorted")
    return msgspec.json.format(text, indent=2).decode() + "\n"


def to_toml(cluster: Cluster) -> str:
    """The cluster as TOML: the name, then one table per device and link in order."""
    lines = [f"name = {_toml(cluster.name)}"]
    for kind, items in (("devices", cluster.devices), ("links", cluster.links)):
        for item in items:
            lines += ["", f"[[{kind}]]"]
            fields = msgspec.structs.asdict(item)
            given = {k: v for k, v in fields.items() if v is not msgspec.UNSET}
            lines += [f"{key} = {_toml(value)}" for key, value in given.items()]
    if not cluster.devices:
        lines.insert(1, "devices = []")
    if not cluster.links:
        lines.insert(1, "links = []")
    return "\n".join(lines) + "\n"


def digest(cluster: Cluster) -> str:
    """SHA-256 in hex of the canonical JSON: sorted keys, no spaces."""
    return hashlib.sha256(msgspec.json.encode(cluster, order="sorted")).hexdigest()


def _toml(value: Any) -> str:
    """A TOML value: string, number, boolean or inline table of numbers."""
    if isinstance(value, str):
        # JSON's escapes of control characters are TOML's too; DEL alone needs one more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        fix = "name the file .toml or .json"
        raise _unreadable(path, f"the suffix {path.suffix!r} is not known", fix)
    return path.suffix


def _unreadable(where: str | Path, why: str, fix: str = "") -> FxpartError:
    fix = fix or "compare it with a file that `Cluster.dump` wrote"
    return error("FXP401", where=str(where), why=why, fix=fix)
