"""Tables about what a run survives. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from record import RESULTS, read

Row = tuple[str, str]


def surviving() -> str:
    """A row for each result that there is, with its command."""
    lines = ["| what | found | command |", "| --- | --- | --- |"]
    machine = ""
    for name, row in ROWS.items():
        if (RESULTS / f"{name}.json").exists():
            result = read(name)
            what, found = row(result["figures"])
            load, on = result["machine"]["load"], result["machine"]
            machine = f"{result['date']}, {on['cores']} cores of {on['cpu']}, torch {on['torch']}."
            lines.append(f"| {what} | {found} | `{result['command']}`, load {load} |")
    return "\n".join([*lines, "", machine])


def _kills(figures: Mapping[str, Any]) -> Row:
    faults = len(figures["faults"])
    runs = sum(row["runs"] for row in figures["cases"].values())
    return (
        "random `kill -9` of one rank or two, rank 0 too, while they start, meet, load, step and"
        " save; pipelines of 4, of 2 with data parallelism of 2, synchronous and asynchronous",
        f"{figures['kills']} kills in {runs} runs; losses, samples, parameters and optimizer state"
        f" other than of the run left alone: {faults or 'none'};"
        f" {figures['seconds_per_kill']:.0f} s a kill, with the start of four Pythons",
    )


def _restarts(figures: Mapping[str, Any]) -> Row:
    kinds, count = figures["kinds"], sum(row["restarts"] for row in figures["kinds"].values())
    slowest = max(row["slowest"] for row in kinds.values())
    return (
        f"restarts under torchrun's rendezvous {', '.join(kinds)}; ranks stopped"
        f" {figures['pauses']} times for 0.3 s, one three times slower",
        f"{count} of {count} come back, the slowest after {slowest:.1f} s;"
        f" {len(figures['alarms']) or 'no'} false alarms",
    )


def _recovery(figures: Mapping[str, Any]) -> Row:
    return (
        "own share of a restart: 4 ranks, 100 M parameters with AdamW's state",
        f"{figures['own_ms'] / 1e3:.2f} s: fxpart's import {figures['import_ms']:.0f} ms, meeting"
        f" {figures['join_ms']:.0f}, the trainer {figures['make_ms']:.0f}, reading and comparing"
        f" {figures['bytes'] / 1e9:.1f} GB {figures['restore_ms']:.0f}",
    )


def _saving(figures: Mapping[str, Any]) -> Row:
    return (
        "saving once in 50 steps: 4 ranks on 2 cores, 100 M parameters with AdamW's state",
        f"{figures['percent']:.1f} % of training time; the step stands still for"
        f" {figures['call_ms']:.0f} ms ({figures['bytes'] / 1e9:.1f} GB)",
    )


def _saving_killed(figures: Mapping[str, Any]) -> Row:
    return (
        "`kill -9` of a process that saves without a pause",
        f"{figures['newest_loaded']} of {figures['kills']} times the newest checkpoint is whole;"
        f" {figures['killed_within_a_save']} kills fell into a save",
    )


def _elastic(figures: Mapping[str, Any]) -> Row:
    apart = figures["largest_loss_difference"]
    return (
        f"4, 3, 2, 4 ranks, {figures['changes']} changes in one run",
        f"{figures['tensors_that_differ'] or 'none'} of {figures['tensors_compared']} tensors"
        f" differs by a bit; losses within {apart:.0e} of one process's; a new plan takes"
        f" {figures['plan_seconds_most']:.2f} s at most (made in advance), the whole change"
        f" {figures['change_seconds_median']:.0f} s",
    )


def _events(figures: Mapping[str, Any]) -> Row:
    return (
        "noting what each rank does, for the postmortem",
        f"{figures['step']['microseconds_an_action']:.2f} µs an action",
    )


def _fewer(readers: Mapping[str, Any]) -> str:
    """The readers that have had fewer files than others."""
    most = max(row["files"] for row in readers.values())
    found = [f"{name} {row['files']:,}" for name, row in readers.items() if row["files"] < most]
    return f", {most:,} each but for {', '.join(found)}" if found else ""


def _fuzz(figures: Mapping[str, Any]) -> Row:
    rows = figures["readers"].values()
    files, failed = sum(row["files"] for row in rows), figures["failed"]
    slowest = max(row["slowest_seconds"] for row in rows)
    most = max(row["process_peak_bytes"] for row in rows)
    return (
        "files changed by accident and on purpose: plans, clusters, schedules, others' tables,"
        f" profiles, checkpoints, rings; {len(rows)} readers{_fewer(figures['readers'])}",
        f"{files:,} files; readers that failed:"
        f" {', '.join(failed) or 'none'}; the slowest file {slowest:.2f} s,"
        f" the largest process {most / 1e6:.0f} MB",
    )


ROWS: dict[str, Callable[[Mapping[str, Any]], Row]] = {
    "kills": _kills,
    "restarts": _restarts,
    "recovery": _recovery,
    "saving": _saving,
    "saving_killed": _saving_killed,
    "elastic": _elastic,
    "events": _events,
    "fuzz": _fuzz,
}
