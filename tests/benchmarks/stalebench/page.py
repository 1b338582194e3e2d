"""Write StaleBench's pages from its results: README.md beside this file, and what others quote.

python tests/benchmarks/stalebench/run.py --page
"""

from __future__ import annotations

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
    WORDS,
    Ratio,
    Row,
    Table,
    count_verdicts,
    list_tables,
)
from readme import replaced
from readme_figures import conditions
from record import HERE, read

NAME, MEASURED = "stalebench", "stalebench_measured"
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
    """Return the verdicts of all methods over the complete cells."""
    counts = count_verdicts(tables)
    lines = [
        f"| method | {' | '.join(WORDS)} | difference, % of a guess's loss |"
        f" updates to the loss at {TARGETS[0]:.0%}, ratio |",
        f"| --- | {'---: | ' * len(WORDS)}--- | --- |",
    ]
    for name, found in counts.items():
        rows = [
            (row, figures["tasks"][t.cell.task]["chance"])
            for t in tables
            if t.complete and (row := t.get(name)) is not None
        ]
        shares = [100 * row.difference.mean / chance for row, chance in rows if row.difference]
        ratios = [each[0] for row, _ in rows if (each := row.updates[0])]
        never = sum(row.updates[0] is None for row, _ in rows)
        reached = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        late = f"not all seeds reach it in {never}" if never else ""
        lines.append(
            f"| {METHODS[name].label} | {' | '.join(str(found[word]) for word in WORDS)}"
            f" | {min(shares):+.1f} to {max(shares):+.1f}"
            f" | {'; '.join(filter(None, (reached, late)))} |"
        )
    return "\n".join(lines)


def tabulate_controls(tables: list[Table]) -> str:
    """Return what look-ahead and NAdam do to synchronous training."""
    lines = [
        "| cell | control | test loss less synchronous | updates to the loss at 50%, ratio |",
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


def tabulate(table: Table, figures: Mapping[str, Any]) -> str:
    """Return a cell as a section."""
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
    head = (
        "method",
        *(
            text
            for part in TARGETS
            for text in (f"updates to the loss at {part:.0%}", "time, M = K", "M = 4 K")
        ),
    )
    parts.append(_format(head, (_list_times(row, simulated) for row in table.rows)))
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


def _list_times(row: Row, simulated: list[float]) -> Iterator[str]:
    yield METHODS[row.method].label
    for updates, reached in zip(row.updates, row.reached, strict=True):
        if updates is None:
            yield from (f"{reached} of {len(row.losses)} seeds reach it", "", "")
            continue
        yield "1" if row.method == SYNC else _show_ratio(updates)
        for sync in simulated[:2]:
            factor = 1.0 if METHODS[row.method].control else simulated[2] / sync
            yield f"{updates[0] * factor:.2f}"


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
    figures = result["figures"]
    tables = list(list_tables(figures))
    pictures = [f"![{name}](images/{name})" for name in draw(figures, tables)]
    made = f"Made by `{result['command']}`: {conditions(result)}."
    return {
        "staleclaim": claim(tables),
        "coverage": f"{describe_coverage(figures, tables)}\n\n{made}",
        "verdicts": summarize(figures, tables),
        "controls": tabulate_controls(tables),
        "cells": "\n\n".join(tabulate(table, figures) for table in tables),
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
