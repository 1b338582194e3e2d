"""The README's table of measurements, a row for each claim. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from readme_planner import gap
from record import RESULTS, read

PAGE = "fxpart/docs/benchmarks.md"


def summary() -> str:
    """A row for each result that exists: what, the figure, its command."""
    lines = ["| what | measured | script |", "| --- | --- | --- |"]
    machines = []
    for name, (what, figure) in ROWS.items():
        if (RESULTS / f"{name}.json").exists():
            result = read(name)
            machine = result["machine"]
            machines.append(f"{machine['cores']} cores of {machine['cpu'].partition(' @')[0]}")
            script = result["command"].rpartition("tests/benchmarks/")[2]
            lines.append(f"| {what} | {figure(result['figures'])} | `{script}` |")
    words = (
        f"All on shared CPUs ({'; '.join(sorted(set(machines)))}). One GPU: see below."
        f" Scripts are in `tests/benchmarks/`; more tables are in [benchmarks]({PAGE})."
    )
    return "\n".join([*lines, "", words])


def _zoo(rows: list[dict[str, Any]]) -> str:
    equal = sum(all(row.get("equal", {"2": False}).values()) for row in rows)
    return f"**{equal} of {len(rows)}** bit-identical on 2 and on 4 stages"


def _equality(figures: Mapping[str, Any]) -> str:
    found = figures["counted"]["over gloo"]
    equal = sum(count for word, count in found.items() if word.startswith("equal"))
    doubled = sum(count for word, count in found.items() if "float64" in word)
    return f"**{equal} of {sum(found.values())}** equal ({doubled} compared in float64)"


def _pipelining(figures: Mapping[str, Any]) -> str:
    found = figures["summary"]
    whole, sent = found["throughput_over_torch"], found["throughput_over_torch_transfers"]
    text = f"**{whole['geometric_mean']:.2f}** times as high, at least {whole['least']:.2f}"
    before = whole.get("least_before")
    if before is not None and before < whole["least"]:
        text += f" ({before:.2f} before repetition of such cases)"
    if sent:
        text += f"; **{sent['geometric_mean']:.2f}** for stages with large boundaries"
    return text


def _data_parallel(figures: Mapping[str, Any]) -> str:
    first, second = (figures[n]["throughput_over_torch"] for n in ("data_parallel", "zero3"))
    return f"**{first:.2f}** and **{second:.2f}** times as high"


def _tensor(figures: Mapping[str, Any]) -> str:
    return f"**{figures['wall']['ratio']:.2f}** of DTensor's time"


def _slow_links(figures: Mapping[str, Any]) -> str:
    found: dict[str, list[float]] = {}
    for rates in figures.values():
        for rate, rows in rates.items():
            speedups = [row["speedup"] for row in rows.values() if isinstance(row, dict)]
            found.setdefault(rate, []).extend(speedups)
    parts = [
        f"{min(all_):.1f} to {max(all_):.1f} {'with links' if rate == 'unshaped' else 'at'} {rate}"
        for rate, all_ in found.items()
    ]
    return "speed-up " + "; ".join(sorted(parts, reverse=True))


def _planner(figures: Mapping[str, Any]) -> str:
    rows = figures["solved"]
    worst = max(row.get("gap", 0.0) for row in rows)
    slowest = max(row["price_cpu_seconds"] + row["solve_cpu_seconds"] for row in rows)
    shell = [row["plan_cpu_seconds"] for row in figures["shell"]]
    return (
        f"{len(rows)} plans, gap to the bound at most {gap(worst)}, at most {slowest:.0f} CPU s;"
        f" `fxpart plan` with capture {min(shell):.0f} to {max(shell):.0f} CPU s"
    )


def _errors(found: Mapping[str, float]) -> str:
    return f"median {100 * found['median']:.1f} %, worst {100 * found['worst']:.1f} %"


def _accuracy(figures: Mapping[str, Any]) -> str:
    return (
        f"{_errors(figures['time'])} ({len(figures['rows'])} plans); at equal pace of the host"
        f" {_errors(figures['paced'])}"
    )


def _memory(figures: Mapping[str, Any]) -> str:
    found = figures["every rank"]
    return f"{_errors(found)} ({found['rows']} ranks), at most {100 * found['under']:.1f} % too low"


def _choice(rows: list[dict[str, Any]]) -> str:
    worst = max(row["regret"] for row in rows)
    least = min(row["correlation"] for row in rows)
    return (
        f"at most {100 * worst:.1f} % slower than the fastest, rank correlation at least"
        f" {least:.2f} ({len(rows)} cases)"
    )


def _kills(figures: Mapping[str, Any]) -> str:
    different = len(figures["faults"]) or "none"
    return f"**{figures['kills']}** kills, runs with different results: {different}"


def _stalebench(figures: Mapping[str, Any]) -> str:
    from benchmarks.stalebench.claims import claim_briefly
    from benchmarks.stalebench.summary import list_tables

    return claim_briefly(list(list_tables(figures)))


def _own_loop(figures: Mapping[str, Any]) -> str:
    return f"**{figures['speed_up_over_two_threads']:.2f}** of its throughput"


# Result: its subject, and its figure.
ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "compatibility": ("small versions of 26 architectures, three AdamW steps, compared with one"
                      " process", _zoo),
    "equality": ("six models, every schedule, data x pipeline parallelism over gloo", _equality),
    "pipelining": ("throughput compared with `torch.distributed.pipelining`, same stages",
                   _pipelining),
    "data_parallel": ("throughput of data parallelism compared with `DistributedDataParallel`, of"
                      " ZeRO-3 with `fully_shard`, 2 processes", _data_parallel),
    "tensor_overhead": ("a tensor-parallel step compared with DTensor, same blocks", _tensor),
    "slow_links": ("asynchronous pipeline compared with `DistributedDataParallel`, shaped links",
                   _slow_links),
    "stalebench": ("test loss of asynchronous training compared with synchronous", _stalebench),
    "pipeline_speed": ("two CPU ranks compared with a plain loop on the same two cores",
                       _own_loop),
    "planner": ("plans of 70 G to 1 T parameters for 128 to 16,384 devices", _planner),
    "choice": ("the selected plan compared with all plans that were run", _choice),
    "accuracy": ("step times of 1 to 4 ranks, predicted without a trial run", _accuracy),
    "memory": ("peak memory of rank processes, predicted", _memory),
    "kills": ("random `kill -9` of ranks", _kills),
}  # fmt: skip
