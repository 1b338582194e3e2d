"""Cluster presets such as "16x8xh100", from the hardware data in ``fxpart.costmodels/devices``."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.validation import MAX_DEVICES
from fxpart.errors import FxpartError, error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxpart.cluster.model import Cluster

_LOCAL = re.compile(r"local(?::(\d{1,9}))?")
_GRID = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([a-z][a-z0-9.-]*)")
MAX_TEXT = 4096
_estimates: dict[str, dict[str, Any]] = {}  # estimated data of this host's GPUs by name


def parse_preset(kind: type[Cluster], text: str) -> Cluster:
    """Return the cluster that a preset names, such as "16x8xh100+8xa100"; FXP404."""
    parts = [_GRID.fullmatch(part.strip()) for part in text.lower().split("+")]
    grids = [(int(part[1] or 1), int(part[2]), part[3]) for part in parts if part]
    if len(grids) < len(parts):
        raise unknown(text)
    return grid(kind, *grids[0]) if len(grids) == 1 else mixed(kind, grids)


def parse_local(text: str) -> int | None:
    """Return the ranks of "local:4"; None for any other text."""
    match = _LOCAL.fullmatch(text.lower())
    return int(match[1] or 1) if match else None


def mixed(kind: type[Cluster], parts: Sequence[tuple[int, int, str]]) -> Cluster:
    """Return a cluster with hosts of several models, linked by the slowest of their networks."""
    if sum(hosts * each for hosts, each, _ in parts) > MAX_DEVICES:
        text = "+".join("x".join(map(str, part)) for part in parts)
        raise unknown(text, f"there are more than {MAX_DEVICES} devices")
    first, made = 0, []
    for hosts, each, model in parts:
        made.append(grid(kind, hosts, each, model, first))
        first += hosts
    network = [device_data(model)["network"] for _, _, model in parts]
    slow = min(network, key=lambda data: data["bandwidth"])
    link = {**slow, "latency": max(data["latency"] for data in network)}
    inside = [link for part in made for link in part.links if link.source != "*"]
    return kind(
        name="+".join(part.name for part in made),
        devices=tuple(device for part in made for device in part.devices),
        links=(*inside, _link("*", "*", link)),
    )


def grid(kind: type[Cluster], hosts: int, per_host: int, model: str, first: int = 0) -> Cluster:
    """Return ``hosts`` hosts with ``per_host`` devices of one model, linked as in its data file.

    first: number of the first host.
    """
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
        for host in range(first, first + hosts)
        for index in range(per_host)
    )
    links = []
    if per_host > 1:
        names = [f"host{host}" for host in range(first, first + hosts)]
        links += [_link(name, name, data["link"]) for name in names]
    if hosts > 1:
        links.append(_link("*", "*", data["network"]))
    name = f"{hosts}x{per_host}x{data['name']}" if hosts > 1 else f"{per_host}x{data['name']}"
    return kind(name=name, devices=devices, links=tuple(links))


def host_of_models(kind: type[Cluster], gpus: Sequence[str], hosts: int = 1) -> Cluster:
    """Return hosts with the GPUs of these models each; the slowest link connects unequal models."""
    if len(set(gpus)) == 1:
        return grid(kind, hosts, len(gpus), gpus[0])
    made = {model: grid(kind, hosts, 1, model) for model in gpus}
    devices = tuple(
        msgspec.structs.replace(made[model].devices[host], name=f"host{host}/gpu:{index}")
        for host in range(hosts)
        for index, model in enumerate(gpus)
    )
    data = [device_data(model) for model in made]
    inside = min((one["link"] for one in data), key=lambda link: link["bandwidth"])
    links = [_link(f"host{host}", f"host{host}", inside) for host in range(hosts)]
    if hosts > 1:
        network = min((one["network"] for one in data), key=lambda link: link["bandwidth"])
        links.append(_link("*", "*", network))
    name = "+".join(f"{gpus.count(model)}x{model}" for model in made)
    name = name if hosts == 1 else f"{hosts}x({name})"
    return kind(name=name, devices=devices, links=tuple(links))


def _link(source: str, target: str, data: dict[str, Any]) -> Link:
    return Link(
        source=source,
        target=target,
        latency=data["latency"],
        bandwidth=data["bandwidth"] * data.get("achieved", 1.0),
        kind=data["kind"],
        origin=data["source"],
    )


def device_data(model: str) -> dict[str, Any]:
    """Return the data of a device model, by its name or an alias; FXP404 if it is unknown."""
    table = _all()
    if model in _estimates:
        return _estimates[model]
    if model not in table:
        raise unknown(model, f"there is no device data for {model[:80]!r}")
    return table[model]


def find_device_data(model: str) -> dict[str, Any]:
    """Return the data of a device model over that of its architecture; {} if it is unknown."""
    known = _estimates.get(model) or _all().get(model) or {}
    return _architectures().get(known.get("architecture", ""), {}) | known


def add_estimate(data: dict[str, Any]) -> None:
    """Add estimated device data of a GPU of this host, under its name, in this process."""
    _estimates[data["name"]] = data


def architecture_data(model: str) -> dict[str, Any] | None:
    """Return what GPUs of a model's architecture reach; None for CPUs and unknown models."""
    known = _estimates.get(model) or _all().get(model) or {}
    found = _architectures().get(known.get("architecture", ""))
    return None if found is None else found | {"sustained": known.get("sustained", 1.0)}


@cache
def _architectures() -> dict[str, dict[str, Any]]:
    """Return the data of all architectures by name."""
    text = files("fxpart.costmodels").joinpath("architectures.toml").read_text(encoding="utf-8")
    return {name: {"name": name} | data for name, data in tomllib.loads(text).items()}


@cache
def _all() -> dict[str, dict[str, Any]]:
    """Return the data of all device models by name and alias."""
    table: dict[str, dict[str, Any]] = {}
    folder = files("fxpart.costmodels").joinpath("devices")
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            data = tomllib.loads(entry.read_text(encoding="utf-8"))
            for name in (data["name"], *data.get("aliases", ())):
                table[name] = data
    return table


def models() -> tuple[str, ...]:
    """Return the sorted names of all device models, without aliases."""
    return tuple(sorted({data["name"] for data in _all().values()}))


def unknown(name: str, why: str = "") -> FxpartError:
    """Return an FXP404 that lists the valid cluster names."""
    return error(
        "FXP404",
        where=f"cluster {name[:80]!r}",
        why=why or "it is neither a preset nor a .toml or .json file",
        fix="use auto, local:4, 8xh100 (devices x model), 16x8xh100 (hosts x devices x model),\n"
        "several of these joined by +, or a file\n"
        f"models: {', '.join(sorted(_all()))}",
    )
