"""Are transfers and collectives predicted right at sizes that were not measured?

    python tests/benchmarks/communication.py [--ranks 2,4] [--budget 40] [--date YYYY-MM-DD] [--dry]

gloo on the loopback interface, one thread a rank. Sizes from 1 KiB to 16 MiB, a factor of two
apart, all in the same interleaved rounds. Every second size is fitted on, the others are held out;
their error is that of the fitted line (latency + bytes / bandwidth) and of the measured curve,
which is what cost models use. Then the same prediction against a second launch of the processes.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from fxpart.costmodels.communication import along, rising
from record import parser, write

from fxpart.cluster.latency_bandwidth_fit import fit
from fxpart.profiling import collectives
from fxpart.profiling.collectives import CollectiveMeasurement
from fxpart.profiling.processes import run_on_processes

SIZES = tuple(1 << power for power in range(10, 25))
TARGET = 0.15


def launched(ranks: int, budget: float, least: int) -> list[CollectiveMeasurement]:
    """Everything measured once, on fresh processes."""
    groups = [list(range(size)) for size in range(2, ranks + 1) if ranks % size == 0]
    asked = collectives.request(
        [(0, 1), (1, 0)], groups[-1:], sizes=SIZES, budget=budget, least=least
    )
    answers = run_on_processes(ranks, collectives.TARGET, asked, 120.0 + 20 * budget)
    return collectives.results(asked, answers)


def errors(first: CollectiveMeasurement, second: CollectiveMeasurement) -> dict[str, list[float]]:
    """Relative errors at the held-out sizes: of the line, the curve, and against the next run."""
    known, held = first.points[::2], first.points[1::2]
    line = fit(known)
    curve = rising(known)

    def by_curve(size: float) -> float:
        return along(curve, size, line.latency, line.inverse_bandwidth)[0]

    return {
        "line": [line(size) / seconds - 1 for size, seconds in held],
        "curve": [by_curve(size) / seconds - 1 for size, seconds in held],
        "next_run": [by_curve(size) / seconds - 1 for size, seconds in second.points[1::2]],
    }


def row(ranks: int, first: CollectiveMeasurement, second: CollectiveMeasurement) -> dict[str, Any]:
    """One operation's figures."""
    found = errors(first, second)
    line = fit(first.points[::2])
    return {
        "ranks": ranks,
        "operation": first.operation,
        "between": list(first.ranks),
        "rounds": [first.rounds, second.rounds],
        "latency_us": round(line.latency * 1e6, 1),
        "gigabytes_per_second": round(1e-9 / line.inverse_bandwidth, 3)
        if line.inverse_bandwidth
        else None,
        "microseconds": [[size, round(seconds * 1e6, 1)] for size, seconds in first.points],
        "errors": {name: [round(value, 4) for value in values] for name, values in found.items()},
        **{
            name: {
                "median": round(median(map(abs, values)), 4),
                "worst": round(max(map(abs, values)), 4),
            }
            for name, values in found.items()
        },
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All operations on each number of ranks."""
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        pair = [launched(ranks, options.budget, options.least) for _ in range(2)]
        for first, second in zip(*pair, strict=True):
            rows.append(row(ranks, first, second))
            said = rows[-1]
            sys.stderr.write(
                f"{ranks} ranks, {said['operation']:<15} "
                + ", ".join(
                    f"{name} {said[name]['median']:.1%} / {said[name]['worst']:.1%}"
                    for name in ("line", "curve", "next_run")
                )
                + "\n"
            )
    return {
        "rows": rows,
        "target": TARGET,
        "all": {
            name: {
                "median": round(median(abs(e) for r in rows for e in r["errors"][name]), 4),
                "worst": round(max(abs(e) for r in rows for e in r["errors"][name]), 4),
                "within_target": round(
                    sum(abs(e) <= TARGET for r in rows for e in r["errors"][name])
                    / sum(len(r["errors"][name]) for r in rows),
                    4,
                ),
            }
            for name in ("line", "curve", "next_run")
        },
    }


def main() -> None:
    """Measure and keep the figures."""
    made = parser(__doc__)
    made.add_argument("--ranks", default="2,4", help="numbers of ranks")
    made.add_argument("--budget", type=float, default=40.0, help="seconds for each launch")
    made.add_argument("--least", type=int, default=9, help="rounds of each launch at least")
    options = made.parse_args()
    write("communication", measure(options), options)


if __name__ == "__main__":
    main()
