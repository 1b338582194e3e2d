"""Presets such as "16x8xh100", made from the hardware data in ``fxpart.costmodels/devices``."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.cluster_io.check import MAX_DEVICES
from fxpart.errors import FxpartError, error

if TYPE_CHECKING:
    from fxpart.cluster import Cluster

_LOCAL = re.compile(r"local(?::(\d{1,9}))?")
_GRID = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([a-z][a-z0-9.-]*)")
MAX_TEXT = 4096


def parse(text: str | Path) -> Cluster:
    """The cluster that ``text`` names: "auto", "local:4", "16x8xh100" or a file."""
    from fxpart.cluster_io.detect import detect, local
    from fxpart.cluster_io.files import SUFFIXES, load

    if isinstance(text, Path):
        return load(text)
    name = text.strip()[:MAX_TEXT]
    if name.endswith(SUFFIXES):
        return load(Path(name))
    if name.lower() == "auto":
        return detect()
    if match := _LOCAL.fullmatch(name.lower()):
        return local(int(match[1] or 1))
    if match := _GRID.fullmatch(name.lower()):
        return grid(int(match[1] or 1), int(match[2]), match[3])
    raise unknown(name)


def grid(hosts: int, per_host: int, model: str) -> Cluster:
    """``hosts`` hosts of ``per_host`` devices of one model, linked as its data file says."""
    from fxpart.cluster import Cluster, Device, Link

    data = device_data(model)
    if hosts < 1 or per_host < 1 or hosts * per_host > MAX_DEVICES:
        why = f"{hosts} x {per_host} devices is not between 1 and {MAX_DEVICES}"
        raise unknown(f"{hosts}x{per_host}x{model}", why)
    origin = f"{data['source']} ({data['date']})"
    devices = tuple(
        Device(
            name=f"host{host}/{data['kind']}:{index}",
            kind=data["kind"],
            model=data["name"],
            host=f"host{host}",
            memory=data["memory"],
            flops=data["flops"],
            bandwidth=data["bandwidth"],
            launch=data["launch"],
            source=origin,
        )
        for host in range(hosts)
        for index in range(per_host)
    )
    links = []
    if per_host > 1:
        links += [_link(Link, f"host{host}", f"host{host}", data["link"]) for host in range(hosts)]
    if hosts > 1:
        links.append(_link(Link, "*", "*", data["network"]))
    name = f"{hosts}x{per_host}x{data['name']}" if hosts > 1 else f"{per_host}x{data['name']}"
    return Cluster(name=name, devices=devices, links=tuple(links))


def _link(make: Any, source: str, target: str, data: dict[str, Any]) -> Any:
    return make(
        source=source,
        target=target,
        latency=data["latency"],
        bandwidth=data["bandwidth"],
        kind=data["kind"],
        origin=data["source"],
    )


def device_data(model: str) -> dict[str, Any]:
    """The data file of a device model, by its name or an alias; FXP404 lists those there are."""
    table = _all()
    if model not in table:
        raise unknown(model, f"there is no device data for {model[:80]!r}")
    return table[model]


@cache
def _all() -> dict[str, dict[str, Any]]:
    """Every device file by name and by alias; read once, as the files are part of the package."""
    table: dict[str, dict[str, Any]] = {}
    folder = files("fxpart.costmodels").joinpath("devices")
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            data = tomllib.loads(entry.read_text(encoding="utf-8"))
            for name in (data["name"], *data.get("aliases", ())):
                table[name] = data
    return table


def models() -> tuple[str, ...]:
    """The names of all device models, without aliases, sorted."""
    return tuple(sorted({data["name"] for data in _all().values()}))


def unknown(name: str, why: str = "") -> FxpartError:
    """FXP404 for a text that names no cluster, with what would."""
    return error(
        "FXP404",
        where=f"cluster {name[:80]!r}",
        why=why or "it is neither a preset nor a .toml or .json file",
        fix="auto, local:4, 8xh100 (devices x model), 16x8xh100 (hosts x devices x model), a file\n"
        f"models: {', '.join(sorted(_all()))}",
    )
