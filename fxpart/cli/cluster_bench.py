"""``fxpart cluster bench``: measure the links, collectives and hosts of a cluster."""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option, parse_seconds
from fxpart.environment import read_launch
from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.profiling.cluster_benchmark import ClusterBenchmarkResult
    from fxpart.profiling.collectives import CollectiveMeasurement

_BYTES = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_LARGEST = 1 << 32


@click.command()
@click.option("--cluster", "-c", default="auto", show_default=True, help="File or preset.")
@click.option("-o", "--out", type=click.Path(), help="Write the cluster with the measurements.")
@click.option("--sizes", help="Bytes of the messages, such as 1k,64k,1m,16m; eight by default.")
@click.option("--budget", default="60s", show_default=True, help="Time for measurements.")
@json_option
def bench(cluster: str, out: str | None, sizes: str | None, budget: str, as_json: bool) -> int:
    """Measure a cluster's transfers, collectives and CPU contention.

    A cluster of one host is measured by new processes; one of several hosts under torchrun, with a
    rank for each device. Pass the written file to --cluster of other verbs. Use an idle machine.
    """
    from fxpart.cluster.model import Cluster
    from fxpart.profiling.cluster_benchmark import bench as measure
    from fxpart.profiling.collectives import SIZES

    given = Cluster.parse(cluster)
    chosen = SIZES if sizes is None else _sizes(sizes)
    first = (job := read_launch()) is None or job.rank == 0
    if first:
        _warn_of_load()
    with output.show_messages(f"measuring {given.name}", first) as show:
        found = measure(
            given,
            sizes=chosen,
            budget=parse_seconds(budget, "--budget"),
            date=datetime.date.today().isoformat(),
            progress=show,
        )
    if not first:
        return 0
    if out is not None:
        found.cluster.dump(out)
        output.note(f"wrote {out}")
    if as_json:
        output.data(as_data(found))
    else:
        output.text("\n".join(describe(found)))
    return 0


def as_data(found: ClusterBenchmarkResult) -> dict[str, Any]:
    """Return the measurements as data."""
    return {
        "cluster": found.cluster,
        "seconds": round(found.seconds, 3),
        "measured": [
            {
                "operation": each.operation,
                "ranks": each.ranks,
                "rounds": each.rounds,
                "points": each.points,
                "latency": each.fit.latency,
                "inverse_bandwidth": each.fit.inverse_bandwidth,
                "residuals": each.fit.residuals,
                "held_out": each.held_out,
            }
            for each in found.measured
        ],
        "hosts": {name: asdict(figures) for name, figures in found.hosts.items()},
    }


def describe(found: ClusterBenchmarkResult) -> list[str]:
    """Return the measurements as lines of text."""
    from fxpart.report.table import table
    from fxpart.units import seconds

    lines = [f"{found.cluster.name}: measured in {seconds(found.seconds)}"]
    if found.measured:
        heads = (
            "operation", "ranks", "smallest", "largest", "latency", "bandwidth", "residual", "worst"
        )  # fmt: skip
        lines += ["", *table(heads, "<<>>>>>>", [_row(each) for each in found.measured])]
        lines += ["residual: median and worst error of latency + bytes / bandwidth at its points"]
    for name, figures in found.hosts.items():
        slow = ", ".join(f"{value:.2f}" for value in figures.slowdown)
        lines += ["", f"host {name}: {figures.cores} cores"]
        lines += [f"  slowdown while 1 to {len(figures.slowdown)} ranks compute: {slow}"]
        if figures.transfer is not None:
            lines.append(
                f"  a transfer slows a rank down like {figures.transfer:.2f} computing ranks"
            )
        for rate, value in figures.rates.items():
            unit = "GB/s" if rate == "bandwidth" else "GFLOP/s"
            lines.append(f"  {rate:<10}{value / 1e9:>9.1f} {unit} per rank while all ranks compute")
    return lines


def _row(each: CollectiveMeasurement) -> tuple[str, ...]:
    from fxpart.units import percent, seconds

    ranks = (" -> " if each.operation == "send" else ",").join(map(str, each.ranks))
    slope = each.fit.inverse_bandwidth
    return (
        each.operation, ranks, seconds(each.points[0][1]), seconds(each.points[-1][1]),
        seconds(each.fit.latency), f"{1e-9 / slope:.2f} GB/s" if slope else "-",
        percent(each.fit.typical), percent(each.fit.worst),
    )  # fmt: skip


def _warn_of_load() -> None:
    """Warn if other processes compute on this machine, which distorts the measurements."""
    from fxpart.cluster.host_detection import cores

    try:
        load = os.getloadavg()[0]
    except OSError:
        return
    if load > 0.3 * cores():
        output.note(
            f"this machine is busy (load {load:.1f} on {cores()} cores): "
            "measurements are slower than on an idle machine"
        )


def _sizes(text: str) -> tuple[int, ...]:
    """Parse ``"1k,16m"`` as ascending bytes, at least two as needed for a fitted line."""
    result = set()
    for part in text.split(","):
        found = _BYTES.fullmatch(part.strip())
        unit = {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()] if found else 0
        value = int(found[1]) << unit if found and len(found[1]) < 12 else 0
        if not 4 <= value <= _LARGEST:
            raise error(
                "FXP109",
                where=f"--sizes {text}",
                why=f"{part.strip()!r} is not a number of bytes from 4 to 4 GiB",
                fix="write them as 1k,64k,1m,16m",
            )
        result.add(value)
    if len(result) < 2:
        raise error(
            "FXP109",
            where=f"--sizes {text}",
            why="latency and bandwidth cannot be separated with one size",
            fix="give two or more sizes, such as 1k,1m",
        )
    return tuple(sorted(result))
