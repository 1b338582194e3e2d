"""The conclusions in sentences, whichever way they come out."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.stalebench.methods import METHODS
from benchmarks.stalebench.summary import MARGIN, Table, count_verdicts

Counts = dict[str, dict[str, int]]


def claim(tables: Sequence[Table]) -> str:
    """Return the conclusion over all complete cells, of every method."""
    done = [table for table in tables if table.complete]
    if not done:
        return "No cell of StaleBench is complete yet, so nothing is claimed."
    never, other = _divide(count_verdicts(done))
    close = (
        " Never significantly above synchronous training, and at most"
        f" {100 * MARGIN:.0f} % of the loss of a guess above it in so many cells:"
        f" {_list(never, 'better', 'not worse')}."
    )
    return (
        f"Test loss after equally many updates in the {_number(done)} of StaleBench (eight paired"
        f" seeds, tuned learning rates, 95 % intervals).{close if never else ''}"
        f" Significantly above {'it' if never else 'synchronous training'} in so many cells:"
        f" {_list(other, 'worse')}."
    )


def claim_briefly(tables: Sequence[Table]) -> str:
    """Return the conclusion for a table of many results."""
    done = [table for table in tables if table.complete]
    if not done:
        return "no cell is complete yet"
    never, other = _divide(count_verdicts(done))
    often = {name: found for name, found in other.items() if 2 * found["worse"] >= _sum(found)}
    seldom = f"never significantly higher: {_list(never)}"
    if not never:
        least = min(other, key=lambda name: other[name]["worse"] / _sum(other[name]))
        named = {least: other[least]}
        seldom = f"higher in fewest: {_list(named, 'worse')}"
    more = "higher in" if never else "in"
    return f"{_number(done)}; {seldom}; {more} at least half: {_list(often)}"


def _number(done: Sequence[Table]) -> str:
    return f"{len(done)} complete cell{'s' if len(done) > 1 else ''}"


def _divide(counts: Counts) -> tuple[Counts, Counts]:
    """Return the methods that are worse in no cell, and the others."""
    never = {name: found for name, found in counts.items() if not found["worse"]}
    return never, {name: found for name, found in counts.items() if found["worse"]}


def _sum(found: dict[str, int]) -> int:
    return sum(found.values())


def _list(counts: Counts, *verdicts: str) -> str:
    """Return the methods, with the number of cells of these verdicts."""
    parts = []
    for name, found in counts.items():
        share = f" ({sum(found[v] for v in verdicts)} of {_sum(found)})" if verdicts else ""
        parts.append(METHODS[name].label + share)
    return ", ".join(parts) or "none"
