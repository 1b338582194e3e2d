"""The README's tables about costs: predictions beside what was measured."""

from __future__ import annotations

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
    head = ("model", "plan", "step predicted", "measured", "error", "process peak", "error")
    lines = [f"| {' | '.join(head)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in found["rows"]:
        cells = [
            row["model"], row["plan"], f"{1e3 * row['predicted']:.0f} ms",
            f"{1e3 * row['measured']:.0f} ms", f"{100 * row['error']:+.1f} %",
            f"{row['measured_bytes'] / 2**20:.0f} MiB", f"{100 * row['bytes_error']:+.1f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    time, memory = (_errors(found[kind]) for kind in ("time", "memory"))
    words = f"Median and worst error of steps {time}; of process peaks {memory}."
    return "\n".join([*lines, "", f"{words} {note}"])


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
    """Predicted and measured bytes of ranks' processes."""
    found = read("memory")["figures"]
    head = (
        "model",
        "rank",
        "malloc frees",
        "predicted tensors",
        "measured above baseline",
        "error",
        "process",
    )
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    for row in found["rows"]:
        cells = [
            row["model"], f"{row['rank']} of {row['ranks']}",
            "at once" if row["prompt"] else "as it is",
            f"{row['predicted'] / 2**20:.0f} MiB", f"{row['measured'] / 2**20:.0f} MiB",
            f"{100 * row['error']:+.1f} %", f"{100 * row['process_error']:+.1f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    bare = found["bare_baseline"] / 2**20
    text = f"process: the error of baseline and tensors together; a bare rank takes {bare:.0f} MiB."
    return "\n".join([*lines, "", f"{text} {note}"])
