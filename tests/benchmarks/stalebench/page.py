"""Write StaleBench's pages from its results: README.md beside this file, and what others quote.

python tests/benchmarks/stalebench/run.py --page
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.stalebench import design
from benchmarks.stalebench.claims import claim
from benchmarks.stalebench.intervals import Difference
from benchmarks.stalebench.methods import METHODS, SYNC, staleness
from benchmarks.stalebench.plots import draw_curves, draw_differences
from benchmarks.stalebench.summary import (
    MARGIN,
    TARGETS,
    Ratio,
    Row,
    Table,
    list_tables,
)
from readme import replaced
from readme_figures import conditions
from record import HERE, read

NAME, MEASURED = "stalebench", "stalebench_measured"
RANKS = 4  # measured
PAGE = Path(__file__).with_name("README.md")
PICTURES = Path(__file__).with_name("images")
QUOTING = (HERE / "RESULTS.md",)
TASKS = {
    "digits": "digits, MLP",
    "clicks": "click logs",
    "images": "digits, CNN",
    "source": "source",
}
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon", "adagrad": "Adagrad"}


def name_cell(cell: design.Cell) -> str:
    """Return a cell's title."""
    return f"{TASKS[cell.task]}, {OPTIMIZERS[cell.optimizer]}, K = {cell.stages}"


# -- what is there --------------------------------------------------------------------------------


def describe_coverage(figures: Mapping[str, Any], tables: list[Table]) -> str:
    """Return the cells with their state, and the data of the tasks."""
    by = {table.cell: table for table in tables}
    lines = ["| cell | seeds | runs | CPU minutes |", "| --- | --- | ---: | ---: |"]
    for cell in design.CELLS:
        seconds, count = figures["seconds"].get(cell.key, (0.0, 0))
        table = by.get(cell)
        state = (
            f"{len(table.seeds)} of {len(design.FINALS)}" if table else "tuning" if count else "-"
        )
        lines.append(f"| {name_cell(cell)} | {state} | {count} | {seconds / 60:.1f} |")
    spent = sum(seconds for seconds, _ in figures["seconds"].values()) / 3600
    runs = sum(count for _, count in figures["seconds"].values())
    whole = sum(design.count_runs(cell) for cell in design.CELLS)
    done = sum(table.complete for table in tables)
    text = (
        f"{done} of {len(design.CELLS)} cells are complete: {runs:,} of about {whole:,} runs,"
        f" {spent:.1f} CPU hours."
    )
    about = [
        f"* {TASKS[name]}: {of['data']}; {of['parameters']:,} parameters, batches of {of['rows']},"
        f" {of['steps']} updates"
        + (
            f". The known model has test loss {of['bound'][0]:.4f} and AUC {of['bound'][1]:.4f}"
            if "bound" in of
            else ""
        )
        + "."
        for name, of in figures["tasks"].items()
    ]
    return "\n".join([text, "", *lines, "", *about])


# -- verdicts -------------------------------------------------------------------------------------


def summarize(figures: Mapping[str, Any], tables: list[Table]) -> str:
    """Return the verdict of each method in each cell."""
    head = ["method", *(name_cell(table.cell) for table in tables)]
    rows = []
    for name, method in METHODS.items():
        found = [_judge(table, name, figures) for table in tables]
        if any(found) and not method.control:
            rows.append([method.label, *found])
    return _format(head, rows)


def _judge(table: Table, method: str, figures: Mapping[str, Any]) -> str:
    row = table.get(method)
    if row is None or row.difference is None:
        return ""
    share = 100 * row.difference.mean / figures["tasks"][table.cell.task]["chance"]
    verdict = f"**{row.verdict}**" if row.verdict in ("better", "worse") else row.verdict
    return f"{verdict} {share:+.1f}"


def tabulate_controls(tables: list[Table]) -> str:
    """Return what look-ahead and NAdam do to synchronous training."""
    lines = [
        "| cell | control | test loss less synchronous | updates to the loss at 50 %, ratio |",
        "| --- | --- | --- | --- |",
    ]
    for table in tables:
        for row in table.rows:
            if METHODS[row.method].control and row.difference is not None:
                ratio = _show_ratio(row.updates[0]) if row.updates[0] else "not reached"
                lines.append(
                    f"| {name_cell(table.cell)} | {METHODS[row.method].label}"
                    f" | {_show(row.difference)} | {ratio} |"
                )
    return "\n".join(lines)


# -- one cell -------------------------------------------------------------------------------------


def tabulate(table: Table, figures: Mapping[str, Any], measured: Mapping[str, float]) -> str:
    """Return a cell as a section. measured: the ratio of seconds of four processes by method."""
    task = figures["tasks"][table.cell.task]
    head = (
        "method", "staleness", "learning rate", "test loss", "less synchronous", "less its control",
        "", task["score"],
    )  # fmt: skip
    pilots = sorted({row.pilots for row in table.rows})
    about = (
        f"{len(table.seeds)} of {len(design.FINALS)} seeds. Tuning runs of a method:"
        f" {' to '.join(dict.fromkeys(str(p) for p in (pilots[0], pilots[-1])))}."
    )
    parts = [f"### {name_cell(table.cell)}", about]
    parts.append(_format(head, (_list_losses(row, table) for row in table.rows)))
    simulated = figures["simulated"][str(table.cell.stages)]
    times = ["time, M = K", "M = 4 K", *(["measured"] if table.cell.stages == RANKS else [])]
    targets = (f"updates to the loss at {100 * part:.0f} %" for part in TARGETS)
    head = "method", *(text for target in targets for text in (target, *times))
    factors = {
        row.method: (*_list_factors(row.method, simulated), measured.get(row.method, math.nan))
        for row in table.rows
    }
    rows = (_list_times(row, factors[row.method][: len(times)]) for row in table.rows)
    parts.append(_format(head, rows))
    return "\n\n".join(parts)


def _format(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _list_losses(row: Row, table: Table) -> Iterator[str]:
    late = staleness(row.method, table.cell.stages)
    yield METHODS[row.method].label
    yield str(late[0]) if late[0] == late[-1] else f"{late[0]} to {late[-1]}"
    yield f"{row.rate:.3g}{' (edge)' if row.edge else ''}"
    lost = f", {row.diverged} diverged" if row.diverged else ""
    yield f"{fmean(row.losses):.4f} ± {stdev(row.losses):.4f}{lost}"
    yield _show(row.difference)
    yield _show(row.controlled)
    yield f"**{row.verdict}**" if row.verdict else ""
    yield f"{fmean(row.scores):.4f}"


def _show(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def _show_ratio(ratio: Ratio) -> str:
    mean, low, high = ratio
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def _list_factors(method: str, simulated: Sequence[float]) -> list[float]:
    """Return the simulated seconds of an update over those of synchronous ones."""
    *sync, unflushed = simulated
    return [1.0 if METHODS[method].control else unflushed / each for each in sync]


def _list_times(row: Row, factors: Sequence[float]) -> Iterator[str]:
    yield METHODS[row.method].label
    for updates, reached in zip(row.updates, row.reached, strict=True):
        if updates is None:
            yield from (f"{reached} of {len(row.losses)} seeds reach it", *[""] * len(factors))
            continue
        yield "1" if row.method == SYNC else _show_ratio(updates)
        for factor in factors:
            yield "" if math.isnan(factor) else f"{updates[0] * factor:.2f}"


def tabulate_seconds(figures: Mapping[str, Any]) -> str:
    """Return the simulated seconds of an update, and the measured ones."""
    lines = ["| K | synchronous, M = K | M = 4 K | asynchronous |", "| ---: | ---: | ---: | ---: |"]
    for stages, found in sorted(figures["simulated"].items(), key=lambda item: int(item[0])):
        lines.append(f"| {stages} | {' | '.join(f'{value:.3f}' for value in found)} |")
    result = read(MEASURED)
    of = result["figures"]
    lines += ["", "| four processes | ms per update | over synchronous | quartiles |"]
    lines += ["| --- | ---: | ---: | ---: |"]
    for name, ms in of["ms"].items():
        low, high = of["quartiles"][name]
        lines.append(
            f"| {METHODS[name].label} | {ms:.0f} | {of['over_sync'][name]:.2f}"
            f" | {low:.2f} to {high:.2f} |"
        )
    lines += ["", f"Made by `{result['command']}`: {conditions(result)}."]
    return "\n".join(lines)


# -- the pages ------------------------------------------------------------------------------------


def draw(figures: Mapping[str, Any], tables: list[Table]) -> dict[str, str]:
    """Return the pictures by file name: differences of each cell, curves of a task's first cell."""
    found, seen = {}, set()
    for table in tables:
        cell, task = table.cell, figures["tasks"][table.cell.task]
        name, title = cell.key.replace(" ", "_"), name_cell(cell)
        found[f"{name}.svg"] = draw_differences(table, title, MARGIN * task["chance"])
        if cell.task not in seen:
            seen.add(cell.task)
            found[f"{name}_curves.svg"] = draw_curves(table, title, task["steps"])
    return found


def contents() -> dict[str, str]:
    """Return the generated blocks by name."""
    result = read(NAME)
    figures, measured = result["figures"], read(MEASURED)["figures"]["over_sync"]
    tables = list(list_tables(figures))
    pictures = [f"![{name}](images/{name})" for name in draw(figures, tables)]
    made = f"Made by `{result['command']}`: {conditions(result)}."
    return {
        "staleclaim": claim(tables),
        "coverage": f"{describe_coverage(figures, tables)}\n\n{made}",
        "verdicts": summarize(figures, tables),
        "controls": tabulate_controls(tables),
        "cells": "\n\n".join(tabulate(table, figures, measured) for table in tables),
        "seconds": tabulate_seconds(figures),
        "pictures": "\n\n".join(pictures),
    }


def rewrite() -> None:
    """Bring the pages and pictures up to the results."""
    blocks, figures = contents(), read(NAME)["figures"]
    files = {p: replaced(p.read_text("utf-8"), blocks) for p in (PAGE, *QUOTING)}
    drawn = draw(figures, list(list_tables(figures)))
    PICTURES.mkdir(exist_ok=True)
    for old in set(PICTURES.glob("*.svg")) - {PICTURES / name for name in drawn}:
        old.unlink()
    files |= {PICTURES / name: text for name, text in drawn.items()}
    for path, text in files.items():
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
