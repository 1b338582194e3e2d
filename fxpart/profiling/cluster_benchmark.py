"""Micro-benchmarks of a cluster's links, collectives and hosts.

A cluster of one host is measured by new processes. A cluster of several hosts is measured under
torchrun, with a rank for each device in the order of the devices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from fxpart.cluster.devices import CollectiveCurve, Device, Host, Link
from fxpart.cluster.latency_bandwidth_fit import Point, fit
from fxpart.cluster.link_index import LinkIndex
from fxpart.cluster.model import Cluster
from fxpart.environment import read_launch
from fxpart.errors import error
from fxpart.profiling import collectives, host_benchmark
from fxpart.profiling.collectives import SIZES, CollectiveMeasurement
from fxpart.profiling.host_benchmark import HostFigures
from fxpart.profiling.processes import Progress, run_on_job_ranks, run_on_processes

_PATIENCE = 10.0  # Multiple of the budget after which a measurement is considered stuck.
_START = 120.0  # Seconds for processes to start.
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST = 64  # Processes on this host.
_HELPERS = 3  # Processes needed to measure the slowdown of a rank by a transfer.


@dataclass(frozen=True)
class ClusterBenchmarkResult:
    """Measurements. cluster: updated by all of them. hosts: figures by host name."""

    cluster: Cluster
    measured: tuple[CollectiveMeasurement, ...]
    hosts: dict[str, HostFigures]
    seconds: float


def bench(
    cluster: Cluster,
    *,
    sizes: Sequence[int] = SIZES,
    budget: float = 60.0,
    date: str = "",
    progress: Progress | None = None,
) -> ClusterBenchmarkResult:
    """Measure the links, collectives and hosts of a cluster and return the updated cluster.

    sizes: bytes of transfers. budget: seconds, half for communication and half for hosts; a minimum
    of rounds is always run. date: YYYY-MM-DD, stored with the figures. Under torchrun, all ranks
    must call this and get the same result. Raises FXP502 if the processes do not match the devices,
    FXP602 without GPUs, FXP109 for both CPUs and GPUs or too many ranks, FXP507 if a rank fails.
    """
    start = time.monotonic()
    kind = _check(cluster)
    device, threads = ("cuda" if kind == "gpu" else "cpu"), _threads(cluster)
    source = _source(cluster, device, threads, date)
    pairs = link_pairs(cluster)
    sent: list[CollectiveMeasurement] = []
    if len(cluster.devices) > 1:
        every = [pair for found in pairs.values() for pair in found]
        payload = collectives.request(
            every, groups(cluster), sizes=sizes, budget=budget / 2, device=device
        )
        answers = _run(
            cluster, len(cluster.devices), collectives.TARGET, payload, threads, progress
        )
        sent = collectives.results(payload, answers)
    figures = _hosts(cluster, device, threads, budget / 2, progress)
    return ClusterBenchmarkResult(
        cluster=_update_cluster(cluster, pairs, sent, figures, source),
        measured=tuple(sent),
        hosts=figures,
        seconds=time.monotonic() - start,
    )


def link_pairs(cluster: Cluster) -> dict[Link, list[tuple[int, int]]]:
    """Return the pairs of ranks to measure for each link.

    Both directions are included if they have the same link, such as one of a host to itself.
    """
    links, found = LinkIndex(cluster), dict[Link, list[tuple[int, int]]]()
    names = [device.name for device in cluster.devices]
    for a, source in enumerate(names):
        for b, target in enumerate(names):
            if a == b:
                continue
            link = links(source, target)
            if link not in found or found[link] == [(b, a)]:
                found.setdefault(link, []).append((a, b))
    return found


def groups(cluster: Cluster) -> list[list[int]]:
    """Return groups of ranks whose collectives are measured.

    These are the first ranks, for each size that divides the number of ranks, and a group with one
    rank of each host.
    """
    count, hosts = len(cluster.devices), [device.host for device in cluster.devices]
    found = [list(range(size)) for size in range(2, count + 1) if count % size == 0]
    spread = [hosts.index(name) for name in dict.fromkeys(hosts)]
    if len(spread) > 1 and count % len(spread) == 0 and spread not in found:
        found.append(spread)
    return found


def _check(cluster: Cluster) -> str:
    """Return the kind of the devices; raise an error if they cannot be measured here."""
    kinds = sorted({device.kind for device in cluster.devices})
    if len(kinds) > 1:
        raise error(
            "FXP109",
            where=f"cluster {cluster.name}",
            why=f"it has devices of the kinds {' and '.join(kinds)}, which cannot form one group",
            fix="measure a separate cluster for each kind of device",
        )
    job, count = read_launch(), len(cluster.devices)
    hosts = {device.host for device in cluster.devices}
    if job is None and len(hosts) > 1:
        raise error(
            "FXP502",
            where=f"cluster {cluster.name}",
            why=f"it has {len(hosts)} hosts, but this process can only start ranks on its own host",
            fix="run torchrun --nnodes HOSTS --nproc-per-node RANKS -m fxpart cluster bench ...",
        )
    if job is None and count > _MOST:
        raise error(
            "FXP109",
            where=f"cluster {cluster.name}",
            why=f"its {count} devices need as many processes on this host, more than {_MOST}",
            fix="measure a smaller cluster of the same devices, such as local:4",
        )
    if job is not None and job.world != count:
        raise error(
            "FXP502",
            where=f"cluster {cluster.name}",
            why=f"it has {count} devices, but there are {job.world} processes",
            fix=f"start {count} processes, or use a cluster of {job.world} devices",
        )
    here = count if job is None else job.local_world
    if kinds == ["gpu"] and torch.cuda.device_count() < here:
        raise error(
            "FXP602",
            where=f"cluster {cluster.name}",
            why=f"it needs {here} GPUs on this host, but torch finds {torch.cuda.device_count()}",
            fix="run on the host with the GPUs, or pass --cluster local:2 for CPU ranks",
        )
    return kinds[0]


def _threads(cluster: Cluster) -> int:
    """Return the computing threads of each rank, one by default."""
    given = cluster.devices[0].threads
    return given if isinstance(given, int) else 1


def _source(cluster: Cluster, device: str, threads: int, date: str) -> str:
    # On one host, transfers use shared memory if possible, and collectives use gloo.
    way = "gloo" if len({each.host for each in cluster.devices}) > 1 else "shared memory and gloo"
    how = f"{way}, " + ("1 thread" if threads == 1 else f"{threads} threads")
    parts = ["measured", "nccl" if device == "cuda" else how, f"torch {torch.__version__}", date]
    return ", ".join(filter(None, parts))


def _run(
    cluster: Cluster,
    count: int,
    target: str,
    payload: dict[str, Any],
    threads: int,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """Run on the ranks of this job, or without a job on ``count`` processes of this host."""
    limit = _START + _PATIENCE * payload["budget"]
    if read_launch() is not None:
        torch.set_num_threads(threads)
        return run_on_job_ranks(target, payload, limit)
    device = payload["device"]
    return run_on_processes(
        count, target, payload, limit, threads=threads, device=device, progress=progress
    )


def _hosts(
    cluster: Cluster, device: str, threads: int, budget: float, progress: Progress | None
) -> dict[str, HostFigures]:
    """Return figures of each host, on CPUs with additional ranks if there are too few."""
    hosts = [each.host for each in cluster.devices]
    ranks = len(hosts)
    if read_launch() is None and device == "cpu" and 1 < ranks < _HELPERS:
        hosts += hosts[:1] * (_HELPERS - ranks)
    known = {name for each in cluster.devices for name in each.flops}
    payload = host_benchmark.request(
        hosts,
        budget=budget,
        dtypes=[name for name in _DTYPES if name in known],
        device=device,
        devices=ranks,
    )
    return host_benchmark.results(
        payload, _run(cluster, len(hosts), host_benchmark.TARGET, payload, threads, progress)
    )


def _update_cluster(
    cluster: Cluster,
    pairs: dict[Link, list[tuple[int, int]]],
    sent: Sequence[CollectiveMeasurement],
    figures: dict[str, HostFigures],
    source: str,
) -> Cluster:
    """Return the cluster with its figures replaced by measurements."""
    hosts = [device.host for device in cluster.devices]
    curves: list[CollectiveCurve] = []
    points = {each.ranks: each.points for each in sent if each.operation == "send"}
    for each in sent:
        if each.operation != "send":
            count = len({hosts[rank] for rank in each.ranks})
            curves.append(collectives.curve(each, count, source))
    changed: dict[str, Any] = {
        "links": tuple(
            _link(link, [points[pair] for pair in pairs.get(link, ())], source)
            for link in cluster.links
        ),
        "devices": tuple(_device(each, figures[each.host]) for each in cluster.devices),
        "hosts": _update_hosts(cluster, figures, source),
    }
    if curves:
        changed["collectives"] = tuple(curves)
    return msgspec.structs.replace(cluster, **changed)


def _link(link: Link, ways: Sequence[tuple[Point, ...]], source: str) -> Link:
    """Return the link with mean measured times; unchanged if it was not measured."""
    if not ways:
        return link
    curve = tuple(
        (way[0][0], sum(seconds for _, seconds in way) / len(way))
        for way in zip(*ways, strict=True)
    )
    line = fit(curve)
    slope = line.inverse_bandwidth or curve[-1][1] / curve[-1][0]
    return msgspec.structs.replace(
        link, latency=line.latency, bandwidth=1 / slope, curve=curve, origin=source
    )


def _device(device: Device, figures: HostFigures) -> Device:
    """Return the device with the rates that ranks of its host reached."""
    before = device.measured if isinstance(device.measured, dict) else {}
    return msgspec.structs.replace(device, measured=before | figures.rates)


def _update_hosts(
    cluster: Cluster, figures: dict[str, HostFigures], source: str
) -> tuple[Host, ...]:
    """Return the cluster's hosts, including all measured ones, in order."""
    known = () if isinstance(cluster.hosts, msgspec.UnsetType) else cluster.hosts
    made = {host.name: host for host in known}
    shared = cluster.devices[0].kind == "cpu"  # GPUs do not share their cores.
    for name, found in figures.items():
        before = made.get(name, Host(name=name))
        made[name] = msgspec.structs.replace(
            before,
            cores=before.cores or found.cores,
            slowdown=found.slowdown if shared else before.slowdown,
            source=source,
        )
    return tuple(made.values())
