"""Tables about costs: predictions and measurements. Imported by readme.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from record import read

_NAMES = {
    "send": "point to point", "all_reduce": "all-reduce", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "broadcast": "broadcast",
}  # fmt: skip


def communication(note: str) -> str:
    """Transfers and collectives at sizes that the fit has not seen."""
    found = read("communication")["figures"]
    head = (
        "ranks", "operation", "latency", "bandwidth", "fitted line", "measured curve",
        "curve, next run",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in found["rows"]:
        name = _NAMES[row["operation"]]
        if row["operation"] == "send":
            name += f", {row['between'][0]} to {row['between'][1]}"
        bandwidth = row["gigabytes_per_second"]
        cells = [
            str(row["ranks"]), name, f"{row['latency_us']:.0f} µs",
            f"{bandwidth:.2f} GB/s" if bandwidth else "-",
            *(_errors(row[kind]) for kind in ("line", "curve", "next_run")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    every = [_errors(found["all"][kind]) for kind in ("line", "curve", "next_run")]
    lines.append(f"| | all | | | {' | '.join(every)} |")
    return "\n".join(
        [*lines, "", f"Median and worst error at sizes that the fit has not seen. {note}"]
    )


def _errors(found: dict[str, float]) -> str:
    return f"{100 * found['median']:.1f} %, {100 * found['worst']:.1f} %"


def accuracy(note: str) -> str:
    """Errors of predicted steps and process peaks, a row for each model."""
    found = read("accuracy")["figures"]
    head = ("model", "plans", "measured steps", "error, median and worst", "at equal pace",
            "process peak, median and worst")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["model"] == model]
        steps = [1e3 * row["measured"] for row in rows]
        peaks = [row["bytes_error"] for row in rows if row["bytes_error"] is not None]
        cells = [
            model, str(len(rows)), f"{min(steps):.0f} to {max(steps):.0f} ms",
            _spread(row["error"] for row in rows), _spread(row["paced_error"] for row in rows),
            _spread(peaks),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    time, paced, memory = (_errors(found[kind]) for kind in ("time", "paced", "memory"))
    runs = max(len(row.get("runs", [0])) for row in found["rows"])
    each = f" ({runs} runs each)" if runs > 1 else ""
    words = (
        f"All steps{each}: median and worst error {time}; at equal pace {paced}; process peaks"
        f" {memory}.{_apart(found)}"
    )
    return "\n".join([*lines, "", f"{words} {note}"])


def _spread(errors: Iterable[float]) -> str:
    """Median and worst absolute error."""
    sizes = sorted(abs(error) for error in errors)
    return f"{100 * statistics.median(sizes):.1f} %, {100 * sizes[-1]:.1f} %"


def _apart(found: dict[str, Any]) -> str:
    """How far the runs of one plan differ: the pace of the host changes by as much."""
    runs = [row["runs"] for row in found["rows"] if len(row.get("runs", ())) > 1]
    apart = sorted(max(each) / min(each) - 1 for each in runs)
    if not apart:
        return ""
    middle, most = f"{100 * statistics.median(apart):.0f} %", f"{100 * apart[-1]:.0f} %"
    return f" Runs of one plan differ by {middle} (median) and {most} at most."


def profiling(note: str) -> str:
    """How long profiling takes, and what is measured once."""
    found = read("profiling")["figures"]
    head = ("run", "profiling", "capture", "command", "ops measured", "ops known", "not measured")
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name in ("first", "again"):
        row = found[name]
        cells = [
            name, f"{row['seconds']:.1f} s", f"{row['capture_seconds']:.1f} s",
            f"{row['wall']:.1f} s", str(row["ops"]), str(row["known_ops"]),
            str(len(row["left_out"])),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    words = [
        f"{layers} layers have {row['operations']} operations, {row['distinct']} of them distinct"
        for layers, row in found["layers"].items()
    ]
    answers = [f"another {what}: {code}" for what, code in sorted(found["refused"].items())]
    text = f"{'; '.join(words)}. A profile of {', '.join(answers)}. {note}"
    return "\n".join([*lines, "", text])


def choice(note: str) -> str:
    """The selected plan and the fastest of those that ran."""
    head = ("model", "ranks", "plans", "selected", "fastest", "regret", "rank correlation",
            "without trial runs")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | --- | --- | ---: | ---: | ---: |"]
    for row in read("choice")["figures"]:
        cells = [
            row["model"], str(row["ranks"]), str(row["plans"]), row["chosen"], row["fastest"],
            f"{100 * row['regret']:.1f} %", f"{row['correlation']:.2f}",
            f"{row['simulated']:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", note])


def memory(note: str) -> str:
    """Predicted and measured peaks of the largest rank of each plan, a row for each model."""
    found = read("memory")["figures"]
    head = ("model", "plans", "tensors", "other process memory", "allocator", "measured peak",
            "error, median and worst")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    fullest = _fullest(found["rows"])
    for model in dict.fromkeys(row["model"] for row in fullest):
        rows = [row for row in fullest if row["model"] == model]
        sizes = [_sizes([row[part] for row in rows])
                 for part in ("tensors", "process", "allocator", "measured")]  # fmt: skip
        cells = [model, str(len(rows)), *sizes, _spread(row["error"] for row in rows)]
        lines.append(f"| {' | '.join(cells)} |")
    largest, every = found["fullest"], found["every rank"]
    limits = found["limits"]
    within = sum(row["fits"] and row["measured"] <= row["memory"] for row in limits)
    refused = sum(not row["less_fits"] for row in limits)
    words = (
        f"Median and worst error {_errors(largest)}, at most {100 * largest['under']:.1f} % too "
        f"low; all {every['rows']} ranks: {_errors(every)}, {100 * every['under']:.1f} %. "
        f"On devices with exactly the memory that a plan needs, {within} of {len(limits)} runs"
        f" stayed within it; with 8 MiB less, {len(limits) - refused} recompute and {refused} had "
        "no plan."
    )
    return "\n".join([*lines, "", f"{words} {note}"])


def memory_layouts(note: str) -> str:
    """Predicted and measured peaks of tensors: a row for each layout, with its ranks' range."""
    found = read("memory_layouts")["figures"]
    head = ("layout", "model", "ranks", "predicted", "measured", "measured / predicted")
    lines = [f"| {' | '.join(head)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for layout in dict.fromkeys(row["layout"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["layout"] == layout]
        ratios = [f"{of(row['ratio'] for row in rows):.3f}" for of in (min, max)]
        sizes = [_sizes([row[key] for row in rows]) for key in ("predicted", "measured")]
        cells = [
            layout,
            rows[0]["model"],
            str(len(rows)),
            *sizes,
            " to ".join(dict.fromkeys(ratios)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    words = (
        f"In {found['within']} of {found['layouts']} layouts every rank is at most 10 % below its "
        "prediction and 3 % above."
    )
    return "\n".join([*lines, "", f"{words} {note}"])


def _sizes(found: list[float]) -> str:
    """Return the smallest and the largest of sizes in MiB."""
    low, high = (f"{value / 2**20:.0f}" for value in (min(found), max(found)))
    return f"{low} MiB" if low == high else f"{low} to {high} MiB"


def _fullest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each plan the rank whose process was the largest."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["model"], row["plan"]
        if key not in found or row["measured"] > found[key]["measured"]:
            found[key] = row
    return list(found.values())
