"""Tables about costs: predictions beside what was measured."""

from __future__ import annotations

import statistics
from typing import Any

from record import read

_NAMES = {
    "send": "point to point", "all_reduce": "all-reduce", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "broadcast": "broadcast",
}  # fmt: skip


def communication(note: str) -> str:
    """Transfers and collectives at sizes that were held out."""
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
    return "\n".join([*lines, "", f"Median and worst error at held-out sizes. {note}"])


def _errors(found: dict[str, float]) -> str:
    return f"{100 * found['median']:.1f} %, {100 * found['worst']:.1f} %"


def accuracy(note: str) -> str:
    """Predicted and measured steps and process peaks, plan by plan."""
    found = read("accuracy")["figures"]
    head = ("model", "plan", "step predicted", "measured", "error", "at equal pace",
            "process peak", "error")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in found["rows"]:
        cells = [
            row["model"], row["plan"], f"{1e3 * row['predicted']:.0f} ms",
            f"{1e3 * row['measured']:.0f} ms", f"{100 * row['error']:+.1f} %",
            f"{100 * row['paced_error']:+.1f} %",
            f"{row['measured_bytes'] / 2**20:.0f} MiB",
            "-" if row["bytes_error"] is None else f"{100 * row['bytes_error']:+.1f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    time, paced, memory = (_errors(found[kind]) for kind in ("time", "paced", "memory"))
    runs = max(len(row.get("runs", [0])) for row in found["rows"])
    each = f" (of {runs} runs each)" if runs > 1 else ""
    words = (
        f"Median and worst error of steps{each} {time}, at equal pace {paced}; of process peaks"
        f" {memory}.{_apart(found)}"
    )
    return "\n".join([*lines, "", f"{words} {note}"])


def _apart(found: dict[str, Any]) -> str:
    """How far the runs of one plan are apart: by as much the host changes its pace meanwhile."""
    runs = [row["runs"] for row in found["rows"] if len(row.get("runs", ())) > 1]
    apart = sorted(max(each) / min(each) - 1 for each in runs)
    if not apart:
        return ""
    middle, most = f"{100 * statistics.median(apart):.0f} %", f"{100 * apart[-1]:.0f} %"
    return f" The runs of one plan are {middle} apart in the middle and {most} at most."


def profiling(note: str) -> str:
    """How long profiling takes, and what is measured once."""
    found = read("profiling")["figures"]
    head = ("run", "profiling", "capturing", "whole command", "ops measured", "known", "left out")
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    for name in ("first", "again"):
        row = found[name]
        cells = [
            name, f"{row['seconds']:.1f} s", f"{row['capture_seconds']:.1f} s",
            f"{row['wall']:.1f} s", str(row["ops"]), str(row["known_ops"]),
            "; ".join(row["left_out"]) or "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    words = [
        f"{layers} layers have {row['operations']} operations, of which {row['distinct']} are"
        " distinct and measured"
        for layers, row in found["layers"].items()
    ]
    answers = [f"of another {what}: {code}" for what, code in sorted(found["refused"].items())]
    text = f"{'; '.join(words)}. A plan by a profile {', '.join(answers)}. {note}"
    return "\n".join([*lines, "", text])


def choice(note: str) -> str:
    """The plan chosen beside the fastest of those that ran."""
    head = ("model", "ranks", "plans", "chosen", "fastest", "regret", "rank correlation",
            "without what was run")  # fmt: skip
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
    """Predicted and measured peaks of ranks' processes, of each plan that of the largest."""
    found = read("memory")["figures"]
    head = ("model", "plan", "tensors", "beside them", "allocator", "predicted", "measured",
            "error")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in _fullest(found["rows"]):
        parts = ("tensors", "process", "allocator", "predicted", "measured")
        sizes = [f"{row[part] / 2**20:.0f} MiB" for part in parts]
        cells = [row["model"], row["plan"], *sizes, f"{100 * row['error']:+.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    largest, every = found["fullest"], found["every rank"]
    limits = found["limits"]
    kept = sum(row["fits"] and row["measured"] <= row["memory"] for row in limits)
    refused = sum(not row["less_fits"] for row in limits)
    words = (
        f"Median and worst error {_errors(largest)}, at most {100 * largest['under']:.1f} % too "
        f"low; of all {every['rows']} ranks {_errors(every)}, {100 * every['under']:.1f} %. "
        f"On devices that a plan just fits {kept} of {len(limits)} kept within their memory; "
        f"{refused} were refused 8 MiB less."
    )
    return "\n".join([*lines, "", f"{words} {note}"])


def _fullest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each plan the rank whose process was the largest."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["model"], row["plan"]
        if key not in found or row["measured"] > found[key]["measured"]:
            found[key] = row
    return list(found.values())
