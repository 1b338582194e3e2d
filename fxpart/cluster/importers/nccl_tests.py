"""Import measurements of nccl-tests (``all_reduce_perf``, ...), as a table or as JSON (-J).

The times of a collective become a :class:`fxpart.cluster.CollectiveCurve`; those of
``sendrecv_perf`` between two ranks become the curve of a link. Times are out-of-place times, and
bytes are those of the whole tensor: the size in ``alltoall_perf`` is multiplied by the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec

from fxpart.cluster.devices import CollectiveCurve, Device, Link
from fxpart.cluster.gpu_detection import match_model
from fxpart.cluster.importers import nccl_json, nccl_table
from fxpart.cluster.importers.nccl_run import NcclTestRun
from fxpart.cluster.importers.source_facts import (
    ImportedCluster,
    ImportOptions,
    make_import_error,
    validate_imported,
)
from fxpart.cluster.latency_bandwidth_fit import LatencyBandwidthFit, Point, fit
from fxpart.cluster.merge import hosts_of, merge_curves, merge_links
from fxpart.cluster.model import Cluster
from fxpart.cluster.presets import device_data
from fxpart.errors import quoted

OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "bcast": "broadcast",
}  # fmt: skip
SEND = "sendrecv"


def looks_like(text: str) -> bool:
    """Return whether a text is the JSON or the table of nccl-tests."""
    return nccl_json.looks_like(text) or nccl_table.looks_like(text)


def read(text: str, facts: ImportOptions) -> ImportedCluster:
    """Add the curves of all runs to the cluster ``into``, or to the devices in the text.

    Raises FXP407 if the text is not such an output or does not match the cluster.
    """
    runs = nccl_json.parse(text) if nccl_json.looks_like(text) else nccl_table.parse(text)
    cluster = facts.into or _cluster(runs[0], facts)
    curves: list[CollectiveCurve] = []
    notes: list[str] = []
    for run in runs:
        name = _operation(run, facts)
        if name == SEND:
            cluster = merge_links(cluster, _links(run, cluster))
        elif name in OPERATIONS:
            curves.append(_curve(run, OPERATIONS[name], cluster))
        else:
            notes.append(f"{run.program or name} is ignored because fxpart does not use it")
    if len(notes) == len(runs):
        raise make_import_error(
            runs[0].where, notes[0], f"import one of {', '.join(sorted(OPERATIONS))}, {SEND}"
        )
    if curves:
        cluster = merge_curves(cluster, curves)
    if not cluster.links and len(cluster.devices) > 1:
        notes.append("the text has no times of links; measure sendrecv_perf between two ranks")
    return ImportedCluster(validate_imported(cluster, "the measurements"), tuple(notes))


def _operation(run: NcclTestRun, facts: ImportOptions) -> str:
    """Return the measured operation, such as "allreduce"; FXP407 if it is unknown."""
    name = run.program or facts.operation or ""
    name = name.lower().removesuffix("_perf").replace("_", "").replace("-", "")
    if not name:
        why = "neither the text nor an option names the measured collective"
        raise make_import_error(
            run.where, why, "pass --operation all_reduce, or include the command in the text"
        )
    return name


def _curve(run: NcclTestRun, operation: str, cluster: Cluster) -> CollectiveCurve:
    """Return the times of a run as a curve of the cluster."""
    if run.ranks > len(cluster.devices):
        why = f"{run.ranks} ranks took part, but the cluster has {len(cluster.devices)} devices"
        raise make_import_error(
            run.where, why, "import it onto the cluster that it was measured on"
        )
    if run.ranks < 2:
        raise make_import_error(run.where, "only one rank took part", "measure at least two ranks")
    points = _points(run, run.ranks if operation == "all_to_all" else 1)
    line = _line(points)
    return CollectiveCurve(
        operation=operation,
        ranks=run.ranks,
        hosts=run.hosts,
        points=points,
        latency=line.latency,
        inverse_bandwidth=line.inverse_bandwidth,
        residual=line.typical,
        source=run.source,
    )


def _points(run: NcclTestRun, factor: int) -> tuple[tuple[float, float], ...]:
    """Return (bytes, median seconds) in ascending order."""
    times: dict[float, list[float]] = {}
    for size, seconds in run.times:
        times.setdefault(float(size * factor), []).append(seconds)
    return tuple((size, median(times[size])) for size in sorted(times))


def _line(points: Sequence[Point]) -> LatencyBandwidthFit:
    """Return the fitted line; a single size gives a bandwidth and no latency."""
    if len(points) == 1:
        ((size, seconds),) = points
        return LatencyBandwidthFit(0.0, seconds / size, (0.0,))
    return fit(points)


def _links(run: NcclTestRun, cluster: Cluster) -> list[Link]:
    """Return the links in both directions between two ranks."""
    if run.ranks != 2:
        why = f"sendrecv_perf over {run.ranks} ranks measures a ring and not a single link"
        raise make_import_error(run.where, why, "measure it between two ranks")
    ends = [_device(cluster, *end) for end in run.places[:2]]
    if len(ends) < 2 or ends[0] is ends[1]:
        raise make_import_error(run.where, "the text does not name the two devices")
    points = _points(run, 1)
    line = _line(points)
    fastest = max(size / seconds for size, seconds in points)
    return [
        Link(
            source=one.name,
            target=other.name,
            latency=line.latency,
            bandwidth=1 / line.inverse_bandwidth if line.inverse_bandwidth > 0 else fastest,
            kind="net" if one.host != other.host else _kind(cluster, one, other),
            origin=f"measured: {run.source}",
            curve=points,
        )
        for one, other in (ends, ends[::-1])
    ]


def _kind(cluster: Cluster, one: Device, other: Device) -> str:
    """Return the kind of the cluster's link between two devices, "" if there is none."""
    from fxpart.errors import FxpartError

    try:
        return cluster.link(one, other).kind
    except FxpartError:
        return ""


def _device(cluster: Cluster, host: str, index: int) -> Device:
    """Return the device of a host with this number in its name, else with this index.

    host: name or address; ignored if the cluster has one host. Raises FXP407 if there is no such
    device.
    """
    hosts = hosts_of(cluster)
    known = () if cluster.hosts is msgspec.UNSET else cluster.hosts
    name = next((h.name for h in known if h.address == host), host)
    if name not in hosts and len(hosts) == 1:
        name = hosts[0]
    devices = [device for device in cluster.devices if device.host == name]
    called = [device for device in devices if device.name.rpartition(":")[2] == str(index)]
    if len(called) == 1:
        return called[0]
    if index >= len(devices):
        why = f"the cluster has no device {index} on a host {quoted(host)}"
        raise make_import_error(
            f"host {quoted(host)}", why, f"use one of its hosts: {', '.join(hosts[:8])}"
        )
    return devices[index]


@dataclass(frozen=True)
class _RankDevice:
    host: str
    index: int
    model: str


def _cluster(run: NcclTestRun, facts: ImportOptions) -> Cluster:
    """Return a cluster of the devices in a run, without links."""
    places = []
    for (host, index), product in zip(run.places, run.products, strict=True):
        model = facts.device or match_model(product)
        if model is None:
            why = f"there is no device data for {quoted(product)}"
            raise make_import_error(
                run.where,
                why,
                "pass --device MODEL, or --into CLUSTER with these devices",
            )
        places.append(_RankDevice(host, index, model))
    if len(places) != run.ranks:
        why = f"{run.ranks} ranks took part, but only {len(places)} are listed"
        raise make_import_error(run.where, why, "pass --into CLUSTER with these devices")
    devices = []
    for place in places:
        data = device_data(place.model)
        devices.append(
            Device(
                name=f"{place.host}/{data['kind']}:{place.index}",
                kind=data["kind"],
                model=data["name"],
                host=place.host,
                memory=data["memory"],
                flops=data["flops"],
                bandwidth=data["bandwidth"],
                launch=data["launch"],
                source=f"{data['source']} ({data['date']})",
            )
        )
    uniform = all(one.model == other.model for one, other in pairwise(places))
    model = devices[0].model if uniform else "mixed"
    return Cluster(
        name=f"{run.hosts}x{run.ranks // run.hosts}x{model}", devices=tuple(devices), links=()
    )
