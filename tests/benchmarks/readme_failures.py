"""Tables about failures and restarts. Imported by readme.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from record import RESULTS, read

Row = tuple[str, str]


def failures() -> str:
    """A row for each result that there is, with its command."""
    lines = ["| what | result | command |", "| --- | --- | --- |"]
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
        "random `kill -9` of one or two ranks while they start, load, step and save;"
        " pipelines of 4 and of 2 x 2, synchronous and asynchronous",
        f"{figures['kills']} kills in {runs} runs; differences from the undisturbed run:"
        f" {faults or 'none'}; {figures['seconds_per_kill']:.0f} s per kill",
    )


def _starts(figures: Mapping[str, Any]) -> Row:
    faults = len(figures["faults"])
    return (
        "several processes start one run at once",
        f"{figures['rounds']} rounds: exactly one trains; faults: {faults or 'none'}",
    )


def _launcher_kills(figures: Mapping[str, Any]) -> Row:
    return (
        "`kill -9` of the launcher, its shell, a rank, or all",
        f"{figures['kills']} kills in {figures['runs']} runs; differences from the undisturbed"
        f" run: {len(figures['faults']) or 'none'}",
    )


def _restarts(figures: Mapping[str, Any]) -> Row:
    kinds, count = figures["kinds"], sum(row["restarts"] for row in figures["kinds"].values())
    slowest = max(row["slowest"] for row in kinds.values())
    return (
        f"restarts under torchrun ({', '.join(kinds)}); ranks paused"
        f" {figures['pauses']} times for 0.3 s, one three times slower",
        f"{count} of {count} resume, the slowest after {slowest:.1f} s;"
        f" {len(figures['alarms']) or 'no'} false alarms",
    )


def _recovery(figures: Mapping[str, Any]) -> Row:
    return (
        "fxpart's share of a restart: 4 ranks, 100 M parameters with AdamW state",
        f"{figures['own_ms'] / 1e3:.2f} s: import {figures['import_ms']:.0f} ms, rendezvous"
        f" {figures['join_ms']:.0f}, trainer {figures['make_ms']:.0f}, reading and verifying"
        f" {figures['bytes'] / 1e9:.1f} GB {figures['restore_ms']:.0f}",
    )


def _saving(figures: Mapping[str, Any]) -> Row:
    return (
        "a checkpoint every 50 steps: 4 ranks on 2 cores, 100 M parameters with AdamW state",
        f"{figures['percent']:.1f} % of training time; a step is interrupted for"
        f" {figures['call_ms']:.0f} ms ({figures['bytes'] / 1e9:.1f} GB)",
    )


def _saving_killed(figures: Mapping[str, Any]) -> Row:
    return (
        "`kill -9` of a process that saves continuously",
        f"the newest checkpoint is complete {figures['newest_loaded']} of {figures['kills']} times;"
        f" {figures['killed_within_a_save']} kills during a save",
    )


def _elastic(figures: Mapping[str, Any]) -> Row:
    apart = figures["largest_loss_difference"]
    return (
        f"4, 3, 2, 4 ranks, {figures['changes']} changes",
        f"{figures['tensors_that_differ'] or 'none'} of {figures['tensors_compared']} tensors"
        f" differs in any bit; losses within {apart:.0e} of one process; a new plan takes at most"
        f" {figures['plan_seconds_most']:.2f} s, a whole change"
        f" {figures['change_seconds_median']:.0f} s",
    )


def _events(figures: Mapping[str, Any]) -> Row:
    return (
        "recording of events for the postmortem",
        f"{figures['step']['microseconds_an_action']:.2f} µs per action",
    )


def _fewer(readers: Mapping[str, Any]) -> str:
    """The readers that read fewer files than others."""
    most = max(row["files"] for row in readers.values())
    found = [f"{name} {row['files']:,}" for name, row in readers.items() if row["files"] < most]
    return f", {most:,} files each except {', '.join(found)}" if found else ""


def _fuzz(figures: Mapping[str, Any]) -> Row:
    rows = figures["readers"].values()
    files, failed = sum(row["files"] for row in rows), figures["failed"]
    slowest = max(row["slowest_seconds"] for row in rows)
    most = max(row["process_peak_bytes"] for row in rows)
    return (
        "fuzzed plans, clusters, schedules, imported tables, profiles, checkpoints and event files;"
        f" {len(rows)} readers{_fewer(figures['readers'])}",
        f"{files:,} files; readers that failed:"
        f" {', '.join(failed) or 'none'}; the slowest file {slowest:.2f} s,"
        f" the largest process {most / 1e6:.0f} MB",
    )


ROWS: dict[str, Callable[[Mapping[str, Any]], Row]] = {
    "kills": _kills,
    "launcher_kills": _launcher_kills,
    "starts": _starts,
    "restarts": _restarts,
    "recovery": _recovery,
    "saving": _saving,
    "saving_killed": _saving_killed,
    "elastic": _elastic,
    "events": _events,
    "fuzz": _fuzz,
}
