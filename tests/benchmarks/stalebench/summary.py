"""What the results say of each cell: paired differences, verdicts, time to loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.stalebench import design
from benchmarks.stalebench.design import CELLS, FINALS, Cell
from benchmarks.stalebench.intervals import Difference, compare, holm, judge, reach
from benchmarks.stalebench.methods import METHODS, SYNC

MARGIN = 0.01  # of the loss of a guess: a smaller difference counts as none
TARGETS = (0.5, 0.75)  # parts of synchronous training's updates at which its loss is a target
WORDS = ("better", "not worse", "unclear", "worse")

Figures = Mapping[str, Any]
Ratio = tuple[float, float, float]  # mean and interval


@dataclass(frozen=True)
class Row:
    """A method in a cell.

    rate: the tuned learning rate. edge: whether it is at the edge of its grid. pilots: tuning runs.
    losses, scores: on the test split, by seed; a diverged run has the loss of a guess. diverged:
    their number. difference, controlled: paired, to synchronous training and to the control with
    the same look-ahead or optimizer. verdict: see `judge`; "" of controls. reached: by target the
    number of seeds that reach it. updates: by target the ratio of the updates until then to those
    of synchronous training, geometric mean and 95 % interval; None if a seed does not reach it.
    """

    method: str
    rate: float
    edge: bool
    pilots: int
    losses: tuple[float, ...]
    scores: tuple[float, ...]
    diverged: int
    curves: tuple[tuple[float, ...], ...]
    difference: Difference | None = None
    controlled: Difference | None = None
    verdict: str = ""
    reached: tuple[int, ...] = ()
    updates: tuple[Ratio | None, ...] = ()


@dataclass(frozen=True)
class Table:
    """A cell with at least two seeds of every method. seeds: those that all have."""

    cell: Cell
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def complete(self) -> bool:
        """Return whether all seeds are there."""
        return len(self.seeds) == len(FINALS)

    def get(self, method: str) -> Row | None:
        """Return the row of a method."""
        return next((row for row in self.rows if row.method == method), None)


def list_tables(figures: Figures) -> Iterator[Table]:
    """Yield the tables of all cells that have one."""
    for cell in CELLS:
        found = make_table(figures, cell)
        if found is not None:
            yield found


def make_table(figures: Figures, cell: Cell) -> Table | None:
    """Return the table of a cell; None while methods are not tuned or have no two common seeds."""
    task, runs = figures["tasks"].get(cell.task), figures["runs"]
    if task is None:
        return None
    tuned = {}
    for name in design.list_methods(cell):
        scores, missing = design.tune(runs, cell, name, task["rates"][cell.optimizer])
        if missing:
            return None
        tuned[name] = scores
    kept = {n: runs[design.name_runs(cell, n, design.best(s))] for n, s in tuned.items()}
    seeds = tuple(s for s in FINALS if all(str(s) in mine for mine in kept.values()))
    if len(seeds) < 2:
        return None
    rows = {name: _make_row(name, tuned[name], kept[name], seeds, task) for name in tuned}
    return Table(cell, seeds, tuple(_compare_rows(rows, task)))


def _make_row(
    name: str,
    scores: Mapping[float, float],
    mine: Mapping[str, Any],
    seeds: tuple[int, ...],
    task: Figures,
) -> Row:
    found = [mine[str(seed)] for seed in seeds]
    chance = task["chance"]
    bad = [loss is None or loss > chance for _, loss, _, _ in found]
    return Row(
        method=name, rate=design.best(scores), edge=design.is_at_edge(scores),
        pilots=len(scores) * len(design.PILOTS),
        losses=tuple(chance if b else row[1] for b, row in zip(bad, found, strict=True)),
        scores=tuple(row[2] or 0.0 for row in found), diverged=sum(bad),
        curves=tuple(tuple(math.nan if c is None else c for c in row[3]) for row in found),
    )  # fmt: skip


def _compare_rows(rows: Mapping[str, Row], task: Figures) -> Iterator[Row]:
    sync = rows[SYNC]
    differences = {name: compare(row.losses, sync.losses) for name, row in rows.items()}
    tested = [name for name in rows if not METHODS[name].control]
    adjusted = dict(zip(tested, holm([differences[n].p for n in tested]), strict=True))
    targets = []
    for part in TARGETS:
        place = round(part * len(sync.curves[0])) - 1
        target = fmean(curve[place] for curve in sync.curves)
        targets.append((target, [reach(curve, target) for curve in sync.curves]))
    for name, row in rows.items():
        other = rows.get(METHODS[name].compared)
        parts = [[reach(curve, target) for curve in row.curves] for target, _ in targets]
        yield Row(
            **{
                **row.__dict__,
                "difference": None if name == SYNC else differences[name],
                "controlled": None
                if name == SYNC or other is None or other.method == SYNC
                else compare(row.losses, other.losses),
                "verdict": judge(differences[name], adjusted[name], MARGIN * task["chance"])
                if name in adjusted
                else "",
                "reached": tuple(sum(each is not None for each in mine) for mine in parts),
                "updates": tuple(
                    _compare_updates(mine, first)
                    for mine, (_, first) in zip(parts, targets, strict=True)
                ),
            }
        )


def _compare_updates(reached: list[float | None], first: list[float | None]) -> Ratio | None:
    pairs = [(a, b) for a, b in zip(reached, first, strict=True) if a is not None and b is not None]
    if len(pairs) < len(reached):
        return None
    found = compare([math.log(a) for a, _ in pairs], [math.log(b) for _, b in pairs])
    return math.exp(found.mean), math.exp(found.low), math.exp(found.high)


def count_verdicts(tables: Sequence[Table]) -> dict[str, dict[str, int]]:
    """Return by method how many complete cells have each verdict."""
    found: dict[str, dict[str, int]] = {}
    for name, method in METHODS.items():
        words = [
            row.verdict
            for table in tables
            if table.complete and (row := table.get(name)) is not None
        ]
        if words and not method.control:
            found[name] = {word: words.count(word) for word in WORDS}
    return found
