"""Import ``nvidia-smi topo -m``: the connection type of each pair of GPUs of a host.

The table has no speeds. The speed of NVLink follows from the number of links and the GPU model;
that of PCIe must be given. Both are nominal, as stated in the origin of each link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.importers.source_facts import (
    ImportedCluster,
    ImportOptions,
    device_model,
    format_location,
    lines,
    make_import_error,
    validate_imported,
)
from fxpart.cluster.merge import collapse, replace_devices, replace_host_links, select_hosts
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import grid
from fxpart.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

# Connection types over PCIe, in ascending distance; SOC is the name of SYS in old drivers.
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_TYPE = re.compile(r"NV\d{1,2}|" + "|".join(PCIE))
_COLUMN = re.compile(r"GPU\d+|NIC\d+|[A-Za-z]\w*_\w+")
_AFFINITY = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")

# Bytes/s of one NVLink in one direction, and its generation: 25 GB/s for generations 2 and 3 (data
# sheets of V100 and A100), 26.5 for 4 (`nvidia-smi nvlink -s`).
_NVLINK = (("v100", 25e9, 2), ("a100", 25e9, 3), ("h100", 26.5e9, 4), ("h200", 26.5e9, 4))
# Seconds before the first byte: NCCL 2.x src/graph/tuning.cc, start of a ring and one hop.
_LATENCY = {"nvlink": 1.18e-5, "pcie": 1.41e-5}
_LATENCY_SOURCE = "latency: NCCL 2.x src/graph/tuning.cc, ring start-up and a hop"


@dataclass(frozen=True)
class NvidiaTopology:
    """The parsed table.

    gpus: such as "GPU0", in order. types: connection type of each ordered pair of GPUs, and of GPU
    and network card. affinity: by GPU, the affinity columns by name. cards: network cards by
    column.
    """

    gpus: tuple[str, ...]
    types: dict[tuple[str, str], str]
    affinity: dict[str, dict[str, str]] = field(default_factory=dict)
    cards: dict[str, str] = field(default_factory=dict)


def looks_like(text: str) -> bool:
    """Return whether a text has the table's header."""
    return any(_header(line) for line in lines(text[:65536]))


def read(text: str, facts: ImportOptions) -> ImportedCluster:
    """Add the links of the table to the GPUs of a host, in their order.

    Without ``into``, the cluster is one host with GPUs of the model ``device``. Raises FXP407 if
    the text is not such a table, does not match the cluster, or if a needed speed is not given.
    """
    table = parse(text)
    cluster = facts.into
    if cluster is None:
        data = device_model(facts, "the table does not name the GPU model")
        cluster = grid(Cluster, 1, len(table.gpus), data["name"])
    for host in select_hosts(cluster, facts):
        cluster = _add_links(cluster, host, table, facts)
    origins = {link.origin.partition(";")[0] for link in cluster.links}
    notes = sorted(origin for origin in origins if origin.startswith("nominal"))
    return ImportedCluster(validate_imported(cluster, "the table"), tuple(notes))


def parse(text: str) -> NvidiaTopology:
    """Parse the table; FXP407 names the invalid line."""
    rows = list(enumerate(lines(text), 1))
    start = next((i for i, (_, line) in enumerate(rows) if _header(line)), None)
    if start is None:
        raise make_import_error("the text", "there is no line with the columns GPU0, GPU1, ...")
    columns = _header(rows[start][1])
    beside = _AFFINITY.findall(rows[start][1])
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    types: dict[tuple[str, str], str] = {}
    affinity: dict[str, dict[str, str]] = {}
    cards = {name: name for name in columns if name not in gpus}
    for place, line in rows[start + 1 :]:
        if match := _LEGEND.fullmatch(line):
            cards[match[1]] = match[2]
        words = line.split()
        if not words or words[0] not in columns:
            continue
        if words[0] in affinity:
            raise make_import_error(format_location(place, line), f"{words[0]} has two rows")
        types |= _row(place, line, columns)
        affinity[words[0]] = dict(zip(beside, words[1 + len(columns) :], strict=False))
    _check(gpus, types, affinity, format_location(*rows[start]))
    return NvidiaTopology(gpus, types, {gpu: affinity[gpu] for gpu in gpus}, cards)


def _header(line: str) -> list[str]:
    """Return the device columns of a header; [] if the line is not a header."""
    words = _AFFINITY.split(line)[0].split()
    whole = words and words[0].startswith("GPU") and all(map(_COLUMN.fullmatch, words))
    return words if whole and ("X" not in words) else []


def _row(place: int, line: str, columns: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the connection types in one row."""
    name, *values = line.split()
    values = values[: len(columns)]
    if len(values) < len(columns):
        why = f"the row has {len(values)} types, but the header has {len(columns)} columns"
        raise make_import_error(format_location(place, line), why)
    for other, value in zip(columns, values, strict=True):
        if (value == "X") != (name == other) or not (value == "X" or _TYPE.fullmatch(value)):
            why = f"{value[:20]!r} is not a connection type of {name} and {other}"
            raise make_import_error(
                format_location(place, line), why, f"use X, NV1 ... NV18, {', '.join(PCIE)}"
            )
    return {(name, other): value for other, value in zip(columns, values, strict=True)}


def _check(
    gpus: Sequence[str],
    types: dict[tuple[str, str], str],
    affinity: dict[str, dict[str, str]],
    where: str,
) -> None:
    """Raise FXP407 if a row is missing or the two directions of a pair differ."""
    if len(set(gpus)) != len(gpus):
        raise make_import_error(where, "a column occurs twice")
    for gpu in gpus:
        if gpu not in affinity:
            raise make_import_error(where, f"{gpu} has a column, but no row")
    for one, other in permutations(gpus, 2):
        if types[one, other] != types[other, one]:
            there, back = types[one, other], types[other, one]
            why = f"{one} to {other} is {there}, but {other} to {one} is {back}"
            raise make_import_error(f"{one} and {other}", why)


def _add_links(cluster: Cluster, host: str, table: NvidiaTopology, facts: ImportOptions) -> Cluster:
    """Add the links of the table between the GPUs of one host."""
    devices = [d for d in cluster.devices if d.host == host and d.kind == "gpu"]
    if len(devices) != len(table.gpus):
        why = f"the table has {len(table.gpus)} GPUs, but host {quoted(host)} of the cluster has "
        why += str(len(devices))
        raise make_import_error(
            f"host {quoted(host)}", why, "import it into a cluster with the same GPUs"
        )
    of = dict(zip(table.gpus, devices, strict=True))
    links = [
        _link(of[one], of[other], table.types[one, other], facts, _segment(table, host, one, other))
        for one, other in permutations(table.gpus, 2)
    ]
    names = [device.name for device in devices]
    cluster = replace_host_links(cluster, host, collapse(host, links, names))
    return replace_devices(cluster, [_add_topology(of[gpu], gpu, table) for gpu in table.gpus])


def _link(one: Device, other: Device, kind: str, facts: ImportOptions, segment: str) -> Link:
    """Return the link of a pair; FXP407 if its speed is unknown."""
    name, bandwidth, origin = "pcie", facts.pcie, ""
    if kind.startswith("NV"):
        name, count = "nvlink", int(kind[2:])
        rate, generation = _nvlink_rate(one, other, facts)
        bandwidth = count * rate
        noun = "link" if count == 1 else "links"
        origin = f"nominal: {count} {noun} x {rate / 1e9:g} GB/s ({generation})"
    elif bandwidth is None:
        why = f"{one.name} and {other.name} are connected over PCIe ({kind}); "
        why += "the table does not contain the PCIe generation and width"
        fix = "pass --pcie-gbs GB/s in one direction: 15.8 for 3.0 x16, 31.5 for 4.0, 63 for 5.0"
        raise make_import_error("--pcie-gbs", why, fix)
    else:
        origin = f"nominal: {kind} over PCIe of {bandwidth / 1e9:g} GB/s, as given"
    return Link(
        source=one.name,
        target=other.name,
        latency=_LATENCY[name],
        bandwidth=bandwidth,
        kind=name,
        origin=f"{origin}; nvidia-smi topo -m; {_LATENCY_SOURCE}",
        segment=segment or UNSET,
    )


def _nvlink_rate(one: Device, other: Device, facts: ImportOptions) -> tuple[float, str]:
    """Return bytes/s of one NVLink in one direction, and their source."""
    if facts.nvlink is not None:
        return facts.nvlink, "as given"
    found = [
        next((entry[1:] for entry in _NVLINK if d.model.startswith(entry[0])), None)
        for d in (one, other)
    ]
    slower = min((x for x in found if x is not None), default=None)
    if slower is None or None in found:
        pair = f"{quoted(one.model)} and {quoted(other.model)}"
        why = f"the speed of NVLink on {pair} is unknown"
        raise make_import_error(
            "--nvlink-gbs", why, "pass --nvlink-gbs GB/s of one NVLink in one direction"
        )
    return slower[0], f"NVLink {slower[1]}"


def _segment(table: NvidiaTopology, host: str, one: str, other: str) -> str:
    """Return the shared segment of a pair's PCIe link: a switch's uplink or downlink, or "".

    GPUs that are connected over one bridge (PIX) are behind one switch. They share its upstream
    port for transfers to another host bridge, and its downstream direction for those from it.
    """
    if table.types[one, other] not in ("PHB", "NODE", "SYS", "SOC"):
        return ""
    for end, way in ((one, "up"), (other, "down")):
        group = [x for x in table.gpus if x == end or table.types[end, x] == "PIX"]
        if len(group) > 1:
            return f"{host}/pcie-switch-of-{group[0].lower()}-{way}"
    return ""


def _add_topology(device: Device, gpu: str, table: NvidiaTopology) -> Device:
    """Add the affinity and network cards of a GPU to its device, as the key ``topology``."""
    topology: dict[str, Any] = {
        key.lower().replace(" ", "_"): value
        for key, value in table.affinity.get(gpu, {}).items()
        if value != "N/A"
    }
    cards = {
        name: table.types[gpu, column]
        for column, name in table.cards.items()
        if (gpu, column) in table.types
    }
    if cards:
        topology["nics"] = cards
    if not topology:
        return device
    extra = {} if device.extra is UNSET else device.extra
    return msgspec.structs.replace(device, extra={**extra, "topology": topology})
