"""What ``nvidia-smi topo -m`` prints: how each pair of one host's GPUs is connected.

The table names types, not speeds. NVLink's speed follows from its lanes and the GPU's model;
that of PCIe has to be given. Both are nominal, and every link says so in its origin.
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
from fxpart.cluster.merge import chosen_hosts, collapse, replace_devices, replace_host_links
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import grid
from fxpart.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

# Types of a pair, by how far it is over PCIe; SOC is what old drivers call SYS.
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_TYPE = re.compile(r"NV\d{1,2}|" + "|".join(PCIE))
_COLUMN = re.compile(r"GPU\d+|NIC\d+|[A-Za-z]\w*_\w+")
_AFFINITY = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*")

# Bytes/s of one lane in one direction and NVLink's generation: 25 GB/s for generations 2 and 3
# (data sheets of V100 and A100), 26.5 for 4, as `nvidia-smi nvlink -s` says.
_LANES = (("v100", 25e9, 2), ("a100", 25e9, 3), ("h100", 26.5e9, 4), ("h200", 26.5e9, 4))
# Seconds before the first byte: NCCL 2.x src/graph/tuning.cc, a ring's start and one hop.
_LATENCY = {"nvlink": 1.18e-5, "pcie": 1.41e-5}
_LATENCY_SOURCE = "latency: NCCL 2.x src/graph/tuning.cc, ring start-up and a hop"


@dataclass(frozen=True)
class NvidiaTopology:
    """The table: what it calls the devices, the type of each pair, what lies near each GPU.

    gpus: such as "GPU0", in order. types: of each ordered pair of GPUs, and of GPU and network
    card. near: for each GPU the columns after the table, by name. cards: the network cards by
    column.
    """

    gpus: tuple[str, ...]
    types: dict[tuple[str, str], str]
    near: dict[str, dict[str, str]] = field(default_factory=dict)
    cards: dict[str, str] = field(default_factory=dict)


def looks_like(text: str) -> bool:
    """Whether a text has the table's header."""
    return any(_header(line) for line in lines(text[:65536]))


def read(text: str, facts: ImportOptions) -> ImportedCluster:
    """The links of the table, onto the GPUs of a host in their order.

    Without ``into`` the GPUs are those of ``device``, on one host. Raises FXP407 where the text is
    no such table, does not fit the cluster, or where a speed is needed that was not given.
    """
    table = parse(text)
    cluster = facts.into
    if cluster is None:
        data = device_model(facts, "the table does not say what the GPUs are")
        cluster = grid(Cluster, 1, len(table.gpus), data["name"])
    for host in chosen_hosts(cluster, facts):
        cluster = _onto(cluster, host, table, facts)
    origins = {link.origin.partition(";")[0] for link in cluster.links}
    notes = sorted(words for words in origins if words.startswith("nominal"))
    return ImportedCluster(validate_imported(cluster, "the table"), tuple(notes))


def parse(text: str) -> NvidiaTopology:
    """The table; FXP407 with the line where it is none."""
    rows = list(enumerate(lines(text), 1))
    start = next((i for i, (_, line) in enumerate(rows) if _header(line)), None)
    if start is None:
        raise make_import_error("the text", "there is no line with the columns GPU0, GPU1, ...")
    columns = _header(rows[start][1])
    beside = _AFFINITY.findall(rows[start][1])
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    types: dict[tuple[str, str], str] = {}
    near: dict[str, dict[str, str]] = {}
    cards = {name: name for name in columns if name not in gpus}
    for place, line in rows[start + 1 :]:
        if match := _LEGEND.fullmatch(line):
            cards[match[1]] = match[2]
        words = line.split()
        if not words or words[0] not in columns:
            continue
        if words[0] in near:
            raise make_import_error(format_location(place, line), f"{words[0]} has two rows")
        types |= _row(place, line, columns)
        near[words[0]] = dict(zip(beside, words[1 + len(columns) :], strict=False))
    _whole(gpus, types, near, format_location(*rows[start]))
    return NvidiaTopology(gpus, types, {gpu: near[gpu] for gpu in gpus}, cards)


def _header(line: str) -> list[str]:
    """The columns of devices in a header; [] where the line is none."""
    words = _AFFINITY.split(line)[0].split()
    whole = words and words[0].startswith("GPU") and all(map(_COLUMN.fullmatch, words))
    return words if whole and ("X" not in words) else []


def _row(place: int, line: str, columns: Sequence[str]) -> dict[tuple[str, str], str]:
    """The types in one row."""
    name, *values = line.split()
    values = values[: len(columns)]
    if len(values) < len(columns):
        why = f"the row has {len(values)} types, the header {len(columns)} columns"
        raise make_import_error(format_location(place, line), why)
    for other, value in zip(columns, values, strict=True):
        if (value == "X") != (name == other) or not (value == "X" or _TYPE.fullmatch(value)):
            why = f"{value[:20]!r} is not how {name} and {other} may be connected"
            raise make_import_error(
                format_location(place, line), why, f"X, NV1 ... NV18, {', '.join(PCIE)}"
            )
    return {(name, other): value for other, value in zip(columns, values, strict=True)}


def _whole(
    gpus: Sequence[str],
    types: dict[tuple[str, str], str],
    near: dict[str, dict[str, str]],
    where: str,
) -> None:
    """FXP407 where a row is missing or the two directions of a pair differ."""
    if len(set(gpus)) != len(gpus):
        raise make_import_error(where, "a column stands there twice")
    for gpu in gpus:
        if gpu not in near:
            raise make_import_error(where, f"{gpu} has a column and no row")
    for one, other in permutations(gpus, 2):
        if types[one, other] != types[other, one]:
            why = f"{one} to {other} is {types[one, other]}, back it is {types[other, one]}"
            raise make_import_error(f"{one} and {other}", why)


def _onto(cluster: Cluster, host: str, table: NvidiaTopology, facts: ImportOptions) -> Cluster:
    """The cluster with the table's links between the GPUs of one host."""
    devices = [d for d in cluster.devices if d.host == host and d.kind == "gpu"]
    if len(devices) != len(table.gpus):
        why = f"the table has {len(table.gpus)} GPUs, host {quoted(host)} of the cluster "
        why += str(len(devices))
        raise make_import_error(
            f"host {quoted(host)}", why, "import it onto the cluster with the same GPUs"
        )
    of = dict(zip(table.gpus, devices, strict=True))
    links = [
        _link(of[one], of[other], table.types[one, other], facts, _segment(table, host, one, other))
        for one, other in permutations(table.gpus, 2)
    ]
    names = [device.name for device in devices]
    cluster = replace_host_links(cluster, host, collapse(host, links, names))
    return replace_devices(cluster, [_told(of[gpu], gpu, table) for gpu in table.gpus])


def _link(one: Device, other: Device, kind: str, facts: ImportOptions, segment: str) -> Link:
    """The link of a pair of a type; FXP407 where its speed is not known."""
    name, bandwidth, origin = "pcie", facts.pcie, ""
    if kind.startswith("NV"):
        name, lanes = "nvlink", int(kind[2:])
        rate, generation = _lane(one, other, facts)
        bandwidth = lanes * rate
        many = "lane" if lanes == 1 else "lanes"
        origin = f"nominal: {lanes} {many} x {rate / 1e9:g} GB/s ({generation})"
    elif bandwidth is None:
        why = f"{one.name} and {other.name} are connected over PCIe ({kind}); "
        why += "the table does not say of which generation and width"
        fix = "--pcie-gbs GB/s in one direction: 15.8 for 3.0 x16, 31.5 for 4.0, 63 for 5.0"
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


def _lane(one: Device, other: Device, facts: ImportOptions) -> tuple[float, str]:
    """Bytes/s of a lane in one direction, and why."""
    if facts.nvlink is not None:
        return facts.nvlink, "as given"
    found = [
        next((lane[1:] for lane in _LANES if d.model.startswith(lane[0])), None)
        for d in (one, other)
    ]
    slower = min((x for x in found if x is not None), default=None)
    if slower is None or None in found:
        pair = f"{quoted(one.model)} and {quoted(other.model)}"
        why = f"how fast a lane of NVLink is on {pair} is not known"
        raise make_import_error(
            "--nvlink-gbs", why, "--nvlink-gbs GB/s of one lane in one direction"
        )
    return slower[0], f"NVLink {slower[1]}"


def _segment(table: NvidiaTopology, host: str, one: str, other: str) -> str:
    """The switch whose one way up a pair shares with its neighbours; "" where there is none.

    GPUs that reach each other over one bridge (PIX) are behind one switch. What leaves it for
    another host bridge takes its one port up, whichever of them sends; what comes, the port down.
    """
    if table.types[one, other] not in ("PHB", "NODE", "SYS", "SOC"):
        return ""
    for end, way in ((one, "up"), (other, "down")):
        group = [x for x in table.gpus if x == end or table.types[end, x] == "PIX"]
        if len(group) > 1:
            return f"{host}/pcie-switch-of-{group[0].lower()}-{way}"
    return ""


def _told(device: Device, gpu: str, table: NvidiaTopology) -> Device:
    """The device with what the table says of its surroundings, under ``topology``."""
    said: dict[str, Any] = {
        key.lower().replace(" ", "_"): value
        for key, value in table.near.get(gpu, {}).items()
        if value != "N/A"
    }
    cards = {
        name: table.types[gpu, column]
        for column, name in table.cards.items()
        if (gpu, column) in table.types
    }
    if cards:
        said["nics"] = cards
    if not said:
        return device
    extra = {} if device.extra is UNSET else device.extra
    return msgspec.structs.replace(device, extra={**extra, "topology": said})
