"""Micro-benchmarks of a cluster: its links, collectives and hosts, on the devices themselves.

A cluster of one host is measured on processes started for it; one of several under torchrun, a rank
for each device, in the order of the devices.
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

_PATIENCE = 10.0  # how many times the budget a measurement may take before it counts as stuck
_START = 120.0  # seconds for processes to start
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST = 64  # processes that this host is asked to start
_HELPERS = 3  # processes that it takes to see a transfer slow a rank down


@dataclass(frozen=True)
class ClusterBenchmarkResult:
    """What was measured. cluster: with all of it. hosts: figures by the host's name."""

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
    """Measure the cluster's links, collectives and hosts, and put that into it.

    sizes: bytes of transfers. budget: seconds, half for what is sent and half for hosts; a few
    rounds are done in any case. date: YYYY-MM-DD, kept with the figures. Under torchrun all ranks
    call this, and all get the same. Raises FXP502 where the processes do not match the devices,
    FXP602 without the GPUs, FXP109 for CPUs beside GPUs or too many ranks, FXP507 where one fails.
    """
    start = time.monotonic()
    kind = _checked(cluster)
    device, threads = ("cuda" if kind == "gpu" else "cpu"), _threads(cluster)
    source = _source(cluster, device, threads, date)
    pairs = link_pairs(cluster)
    sent: list[CollectiveMeasurement] = []
    if len(cluster.devices) > 1:
        every = [pair for found in pairs.values() for pair in found]
        asked = collectives.request(
            every, groups(cluster), sizes=sizes, budget=budget / 2, device=device
        )
        answers = _run(cluster, len(cluster.devices), collectives.TARGET, asked, threads, progress)
        sent = collectives.results(asked, answers)
    figures = _hosts(cluster, device, threads, budget / 2, progress)
    return ClusterBenchmarkResult(
        cluster=_filled(cluster, pairs, sent, figures, source),
        measured=tuple(sent),
        hosts=figures,
        seconds=time.monotonic() - start,
    )


def link_pairs(cluster: Cluster) -> dict[Link, list[tuple[int, int]]]:
    """For each link that a transfer between two devices takes, ranks at its ends.

    Both ways where the link is the same for both, as one of a host to itself or of "*".
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
    """Groups of ranks whose collectives are measured: of each size that divides all ranks.

    Neighbours, which are on one host where it has as many; and one rank of each host.
    """
    count, hosts = len(cluster.devices), [device.host for device in cluster.devices]
    found = [list(range(size)) for size in range(2, count + 1) if count % size == 0]
    spread = [hosts.index(name) for name in dict.fromkeys(hosts)]
    if len(spread) > 1 and count % len(spread) == 0 and spread not in found:
        found.append(spread)
    return found


def _checked(cluster: Cluster) -> str:
    """The kind of the devices, where this process can measure them."""
    kinds = sorted({device.kind for device in cluster.devices})
    if len(kinds) > 1:
        raise error(
            "FXP109",
            where=f"cluster {cluster.name}",
            why=f"it has devices of the kinds {' and '.join(kinds)}, which no group joins",
            fix="measure the devices of each kind as a cluster of their own",
        )
    job, count = read_launch(), len(cluster.devices)
    hosts = {device.host for device in cluster.devices}
    if job is None and len(hosts) > 1:
        raise error(
            "FXP502",
            where=f"cluster {cluster.name}",
            why=f"it has {len(hosts)} hosts, and this process can start ranks on its own alone",
            fix="torchrun --nnodes HOSTS --nproc-per-node RANKS -m fxpart cluster bench ...",
        )
    if job is None and count > _MOST:
        raise error(
            "FXP109",
            where=f"cluster {cluster.name}",
            why=f"its {count} devices would take as many processes on this host, above {_MOST}",
            fix="measure a smaller cluster of the same devices, such as local:4",
        )
    if job is not None and job.world != count:
        raise error(
            "FXP502",
            where=f"cluster {cluster.name}",
            why=f"it has {count} devices and there are {job.world} processes",
            fix=f"start {count} processes, or name a cluster of {job.world} devices",
        )
    here = count if job is None else job.local_world
    if kinds == ["gpu"] and torch.cuda.device_count() < here:
        raise error(
            "FXP602",
            where=f"cluster {cluster.name}",
            why=f"it wants {here} GPUs here and torch finds {torch.cuda.device_count()}",
            fix="run where the GPUs are, or give --cluster local:2 for ranks on the CPU",
        )
    return kinds[0]


def _threads(cluster: Cluster) -> int:
    """Of computation in each rank: what the devices say, else one."""
    given = cluster.devices[0].threads
    return given if isinstance(given, int) else 1


def _source(cluster: Cluster, device: str, threads: int, date: str) -> str:
    # On one host ranks send through shared memory where they can, and their collectives use gloo.
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
    """On the ranks of the job that this is one of, or on ``count`` processes of this host."""
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
    """Figures of each host; ranks beside those of the devices help where CPUs may have them."""
    hosts = [each.host for each in cluster.devices]
    ranks = len(hosts)
    if read_launch() is None and device == "cpu" and 1 < ranks < _HELPERS:
        hosts += hosts[:1] * (_HELPERS - ranks)
    known = {name for each in cluster.devices for name in each.flops}
    asked = host_benchmark.request(
        hosts,
        budget=budget,
        dtypes=[name for name in _DTYPES if name in known],
        device=device,
        devices=ranks,
    )
    return host_benchmark.results(
        asked, _run(cluster, len(hosts), host_benchmark.TARGET, asked, threads, progress)
    )


def _filled(
    cluster: Cluster,
    pairs: dict[Link, list[tuple[int, int]]],
    sent: Sequence[CollectiveMeasurement],
    figures: dict[str, HostFigures],
    source: str,
) -> Cluster:
    """The cluster with what was measured in the place of what it said."""
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
        "hosts": _described(cluster, figures, source),
    }
    if curves:
        changed["collectives"] = tuple(curves)
    return msgspec.structs.replace(cluster, **changed)


def _link(link: Link, ways: Sequence[tuple[Point, ...]], source: str) -> Link:
    """The link with the mean of what was measured over it each way; itself where nothing was."""
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
    """The device with the rates that its host's ranks reached."""
    before = device.measured if isinstance(device.measured, dict) else {}
    return msgspec.structs.replace(device, measured=before | figures.rates)


def _described(cluster: Cluster, figures: dict[str, HostFigures], source: str) -> tuple[Host, ...]:
    """The cluster's hosts, one for each that was measured, in order."""
    known = () if isinstance(cluster.hosts, msgspec.UnsetType) else cluster.hosts
    made = {host.name: host for host in known}
    shared = cluster.devices[0].kind == "cpu"  # GPUs do not share what they compute with
    for name, found in figures.items():
        before = made.get(name, Host(name=name))
        made[name] = msgspec.structs.replace(
            before,
            cores=before.cores or found.cores,
            slowdown=found.slowdown if shared else before.slowdown,
            source=source,
        )
    return tuple(made.values())
