"""The README's summary of what was measured, a row for each claim. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heterogeneous_measured import over_best
from readme_planner import gap, others_load
from record import RESULTS, read

PAGE = "fxpart/docs/measured.md"


def summary() -> str:
    """A row for each result that there is: what, the figure, its command."""
    lines = ["| what | measured | command |", "| --- | --- | --- |"]
    machines = []
    for name, (what, figure) in ROWS.items():
        if (RESULTS / f"{name}.json").exists():
            result = read(name)
            machine = result["machine"]
            machines.append(f"{machine['cores']} cores of {machine['cpu']}")
            lines.append(f"| {what} | {figure(result['figures'])} | `{name}.py` |")
    words = (
        f"CPUs alone ({'; '.join(sorted(set(machines)))}), shared with others. Scripts are in"
        f" `tests/benchmarks/`; all tables, with dates, loads and cases, are on [one page]({PAGE})."
    )
    return "\n".join([*lines, "", words])


def _zoo(rows: list[dict[str, Any]]) -> str:
    equal = sum(all(row.get("equal", {"2": False}).values()) for row in rows)
    return f"**{equal} of {len(rows)}** equal in every bit on 2 and on 4 stages"


def _equality(figures: Mapping[str, Any]) -> str:
    found = figures["counted"]["over gloo"]
    equal = sum(count for word, count in found.items() if word.startswith("equal"))
    doubled = sum(count for word, count in found.items() if "float64" in word)
    return f"**{equal} of {sum(found.values())}** equal ({doubled} of them compared in float64)"


def _pipelining(figures: Mapping[str, Any]) -> str:
    found = figures["summary"]
    whole, sent = found["throughput_over_torch"], found["throughput_over_torch_transfers"]
    text = f"**{whole['geometric_mean']:.2f}** times as much, at least {whole['least']:.2f}"
    before = whole.get("least_before")
    if before is not None and before < whole["least"]:
        text += f" ({before:.2f} before such cases were measured again)"
    if sent:
        text += f"; **{sent['geometric_mean']:.2f}** where stages have much to send"
    return text


def _tensor(figures: Mapping[str, Any]) -> str:
    return f"**{figures['wall']['ratio']:.2f}** of its time"


def _asynchronous(figures: Mapping[str, Any]) -> str:
    shares = [row["of_bound"] for rows in figures["cases"].values() for row in rows.values()]
    most = figures["summary"]["prediction_share_most"]
    return f"{min(shares):.0%} to {max(shares):.0%} of it; prediction takes at most {most:.1%}"


def _slow_links(figures: Mapping[str, Any]) -> str:
    found: dict[str, list[float]] = {}
    for rates in figures.values():
        for rate, rows in rates.items():
            speedups = [row["speedup"] for row in rows.values() if isinstance(row, dict)]
            found.setdefault(rate, []).extend(speedups)
    parts = [f"{min(all_):.1f} to {max(all_):.1f} at {rate}" for rate, all_ in found.items()]
    return "a step is faster by " + "; ".join(sorted(parts, reverse=True))


def _planner(figures: Mapping[str, Any]) -> str:
    rows = figures["solved"]
    worst = max(row.get("gap", 0.0) for row in rows)
    slowest = max(row["price_cpu_seconds"] + row["solve_cpu_seconds"] for row in rows)
    return f"{len(rows)} plans, the largest gap {gap(worst)}, at most {slowest:.0f} CPU s"


def _maxload(figures: Mapping[str, Any]) -> str:
    rows = figures["published"]
    optimal = sum(row["dp"]["status"] == "optimal" for row in rows)
    people = [load for row in rows if (load := others_load(row, "people"))]
    return (
        f"{optimal} of {len(rows)} chains optimal; human experts' load is {min(people):.2f} to"
        f" {max(people):.2f} of it"
    )


def _errors(found: Mapping[str, float]) -> str:
    return f"median {100 * found['median']:.1f} %, worst {100 * found['worst']:.1f} %"


def _accuracy(figures: Mapping[str, Any]) -> str:
    return (
        f"{_errors(figures['time'])} of {len(figures['rows'])} plans; at equal pace of the host"
        f" {_errors(figures['paced'])}"
    )


def _memory(figures: Mapping[str, Any]) -> str:
    found = figures["every rank"]
    return f"{_errors(found)} of {found['rows']} ranks, at most {100 * found['under']:.1f} % under"


def _choice(rows: list[dict[str, Any]]) -> str:
    worst = max(row["regret"] for row in rows)
    least = min(row["correlation"] for row in rows)
    return (
        f"at most {100 * worst:.1f} % slower than the fastest that ran, rank correlation at least"
        f" {least:.2f} ({len(rows)} of 8 cases)"
    )


def _profiling(figures: Mapping[str, Any]) -> str:
    return f"{figures['first']['seconds']:.0f} s, {figures['again']['seconds']:.0f} s again"


def _unlike(figures: Mapping[str, Any]) -> str:
    found = [over_best(row)[1] for row in figures["rows"]]
    return (
        f"{min(found):.2f} to {max(found):.2f} of the best homogeneous plan's;"
        f" {figures['ratios_within_bound']} of {figures['ratios']} ratios predicted within 15 %"
    )


def _kills(figures: Mapping[str, Any]) -> str:
    return f"**{figures['kills']}**, numbers that differ: {len(figures['faults']) or 'none'}"


def _recovery(figures: Mapping[str, Any]) -> str:
    return f"{figures['own_ms'] / 1e3:.1f} s"


def _startup(figures: Mapping[str, Any]) -> str:
    return f"{1e3 * figures['cpu_seconds']['fxpart explain plan.json']:.0f} CPU ms"


# Result: what it is about, and its figure.
ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "compatibility": ("small versions of 26 architectures, three AdamW steps, against one process",
                      _zoo),
    "equality": ("six models, every schedule, data x pipeline, processes over gloo", _equality),
    "pipelining": ("throughput beside `torch.distributed.pipelining`, same stages", _pipelining),
    "tensor_overhead": ("a tensor-parallel step beside DTensor's, same blocks", _tensor),
    "asynchronous": ("asynchronous 1F1B over synchronous, share of the bound (M+K-1)/M",
                     _asynchronous),
    "slow_links": ("the asynchronous pipeline beside `DistributedDataParallel`, shaped links",
                   _slow_links),
    "planner": ("plans of 70 G to 1 T parameters for 128 to 16,384 devices", _planner),
    "maxload": ("published instances of others, split into chains", _maxload),
    "accuracy": ("steps of 1 to 4 ranks, predicted without running a plan", _accuracy),
    "memory": ("peaks of ranks' processes, predicted", _memory),
    "choice": ("the plan chosen beside the fastest of all that were run", _choice),
    "profiling": ("profiling GPT-2 small for two ranks", _profiling),
    "heterogeneous_measured": ("plans chosen for ranks of unlike CPU quotas, throughput", _unlike),
    "kills": ("random `kill -9` of ranks", _kills),
    "recovery": ("own share of a restart, 4 ranks and 100 M parameters", _recovery),
    "startup": ("a fresh `fxpart explain plan.json`", _startup),
}  # fmt: skip
