"""Parse SLURM node lists such as ``node[01-03,7],gpu-a[1-2]`` into clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import msgspec
from msgspec import UNSET

from fxpart import environment
from fxpart.cluster.devices import Device, Host, Link
from fxpart.cluster.importers.source_facts import (
    NO_NETWORK,
    ImportedCluster,
    ImportOptions,
    device_model,
    format_location,
    lines,
    make_import_error,
    network,
    validate_imported,
)
from fxpart.cluster.merge import hosts_of
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import grid
from fxpart.cluster.validation import MAX_DEVICES

_VARIABLE = re.compile(r"(?:export )?(SLURM\w*)=(.*)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


def looks_like(text: str) -> bool:
    """Return whether a text has SLURM variables, or only node names."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return bool(_VARIABLE.match(first) or re.fullmatch(r"[A-Za-z0-9._,\[\]-]+", first))


def read(text: str, facts: ImportOptions) -> ImportedCluster:
    """Return the hosts of a node list, or of ``env | grep SLURM``.

    With ``into``, its hosts get the nodes' names as addresses, in order. Otherwise each node has
    ``per_host`` or SLURM_GPUS_ON_NODE devices of the given model.
    """
    job = _job(text)
    nodes = expand(job.nodes)
    if facts.into is not None:
        return ImportedCluster(_set_addresses(facts.into, nodes))
    data = device_model(facts, "a node list does not name the device model")
    each = facts.per_host or count(job.gpus, "SLURM_GPUS_ON_NODE")
    each = each or count(job.tasks, "SLURM_NTASKS_PER_NODE")
    if not each:
        why = "a node list does not contain the number of devices per node"
        raise make_import_error("--per-host", why, "pass --per-host COUNT")
    cores = cpus(job.cpus, len(nodes))
    made = replicate_host(grid(Cluster, 1, each, data["name"]), nodes, cores, network(facts))
    notes = (NO_NETWORK,) if len(nodes) > 1 and facts.network is None else ()
    return ImportedCluster(validate_imported(made, "the node list"), notes)


def _job(text: str) -> environment.Slurm:
    """Return the job of SLURM variables, or of names separated by lines or commas."""
    variables: dict[str, str] = {}
    names: list[str] = []
    for place, line in enumerate(lines(text), 1):
        text_line = line.strip()
        match = _VARIABLE.fullmatch(text_line)
        if match:
            variables[match[1]] = match[2].strip("'\"")
        elif text_line and not text_line.startswith("#") and "=" not in text_line:
            if len(text_line.split()) > 1:
                raise make_import_error(
                    format_location(place, line), "a node name must not contain spaces"
                )
            names.append(text_line.strip(","))
    job = environment.read_slurm(variables)
    if job is not None:
        return job
    if not names:
        raise make_import_error(
            "the text", "it contains neither SLURM_JOB_NODELIST nor a node list"
        )
    return environment.Slurm(nodes=",".join(names))


def expand(text: str, limit: int = MAX_DEVICES) -> tuple[str, ...]:
    """Return the distinct nodes of a list, in order; FXP407 if the list is not valid."""
    found: dict[str, None] = {}
    for item in _items(text):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # Odd parts are in brackets.
        if any(re.search(r"[\[\]]", part) for part in parts):
            raise make_import_error(
                f"node list {text[:80]!r}", f"the brackets of {item[:80]!r} do not match"
            )
        literals = "".join(parts[::2])
        if (literals and not _PLAIN.fullmatch(literals)) or not item:
            raise make_import_error(f"node list {text[:80]!r}", f"{item[:80]!r} is not a node name")
        choices = [
            list(_numbers(part, text, limit)) if odd % 2 else [part]
            for odd, part in enumerate(parts)
        ]
        size = 1
        for choice in choices:
            size *= len(choice)
        if size + len(found) > limit:
            raise make_import_error(f"node list {text[:80]!r}", f"it names more than {limit} nodes")
        found.update(dict.fromkeys("".join(name) for name in product(*choices)))
    return tuple(found)


def _items(text: str) -> list[str]:
    """Split a list at its commas, except within brackets."""
    items, depth = [""], 0
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _numbers(text: str, whole: str, limit: int) -> Iterator[str]:
    """Yield the numbers of ``01-03,7``, with the leading zeros of each range's first number."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise make_import_error(
                f"node list {whole[:80]!r}", f"[{part[:80]}] is not an ascending range of numbers"
            )
        if last - first >= limit:
            raise make_import_error(
                f"node list {whole[:80]!r}", f"it names more than {limit} nodes"
            )
        yield from (f"{number:0{len(match[1])}}" for number in range(first, last + 1))


def count(text: str, name: str) -> int | None:
    """Return the number in a SLURM variable, None if unset; FXP407 if it is not valid."""
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,6}", text):
        return int(text)
    raise make_import_error(f"{name}={text[:80]!r}", "it is not a number of devices")


def cpus(text: str, nodes: int) -> tuple[int, ...]:
    """Return the cores of each node from ``40(x2),20``; () if unknown or for other nodes."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = _REPEATED.fullmatch(part)
        if match is None or int(match[2] or 1) > MAX_DEVICES:
            raise make_import_error(
                f"SLURM_JOB_CPUS_PER_NODE={text[:80]!r}", f"{part[:40]!r} is not a number"
            )
        if len(found) <= nodes:  # More entries than nodes: another node list.
            found += [int(match[1])] * int(match[2] or 1)
    return tuple(found) if len(found) == nodes else ()


def replicate_host(
    base: Cluster,
    nodes: tuple[str, ...],
    cores: tuple[int, ...] = (),
    between: tuple[Link, ...] = (),
    inspected: str = "",
) -> Cluster:
    """Repeat the single host of ``base`` for each node.

    cores: by node, if known. between: links between hosts. inspected: the node that was detected;
    the others are assumed to be equal, as stated in the source of their devices.
    """
    (old,) = hosts_of(base)
    if len(nodes) * len(base.devices) > MAX_DEVICES:
        raise make_import_error("the cluster", f"it has more than {MAX_DEVICES} devices")
    devices: list[Device] = []
    links: list[Link] = []
    hosts: list[Host] = []
    known = [] if base.hosts is UNSET else list(base.hosts)
    for place, node in enumerate(nodes):
        note = f"; assumed to be equal to {inspected}" if inspected and node != inspected else ""
        names = {old: node}
        for device in base.devices:
            name = names[device.name] = f"{node}/{device.name.rpartition('/')[2]}"
            changes = {"name": name, "host": node, "source": device.source + note}
            devices.append(msgspec.structs.replace(device, **changes))
        links += [
            msgspec.structs.replace(
                x, source=names.get(x.source, x.source), target=names.get(x.target, x.target)
            )
            for x in base.links
        ]
        host = Host(name=node) if not known else msgspec.structs.replace(known[0], name=node)
        if cores:
            host = msgspec.structs.replace(
                host, cores=cores[place], source="SLURM_JOB_CPUS_PER_NODE"
            )
        elif note and host.cores:
            host = msgspec.structs.replace(host, source=host.source + note)
        hosts.append(msgspec.structs.replace(host, address=node))
    first = f"{len(nodes)}x{len(base.devices)}x{base.devices[0].model}"
    return Cluster(
        name=first if len(nodes) > 1 else base.name,
        devices=tuple(devices),
        links=(*links, *between) if len(nodes) > 1 else tuple(links),
        hosts=tuple(hosts),
    )


def _set_addresses(cluster: Cluster, nodes: tuple[str, ...]) -> Cluster:
    """Set the nodes as addresses of the cluster's hosts, in order."""
    names = hosts_of(cluster)
    if len(names) != len(nodes):
        raise make_import_error(
            "the node list", f"it has {len(nodes)} nodes, but the cluster has {len(names)} hosts"
        )
    old = {} if cluster.hosts is UNSET else {host.name: host for host in cluster.hosts}
    hosts = tuple(
        msgspec.structs.replace(old.get(name, Host(name=name)), address=node)
        for name, node in zip(names, nodes, strict=True)
    )
    return msgspec.structs.replace(cluster, hosts=hosts)
