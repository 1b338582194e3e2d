"""The conclusions in sentences, whichever way they come out."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.stalebench.methods import METHODS
from benchmarks.stalebench.summary import MARGIN, Table, count_verdicts


def claim(tables: Sequence[Table]) -> str:
    """Return the conclusion over all complete cells, of every method."""
    done = [table for table in tables if table.complete]
    if not done:
        return "No cell of StaleBench is complete yet, so nothing is claimed."
    good, bad, mixed = _sort_methods(done)
    cells = "the only complete cell" if len(done) == 1 else f"all {len(done)} complete cells"
    return (
        f"Test loss after equally many updates, in {cells} of StaleBench (eight paired seeds, tuned"
        f" learning rates, 95 % intervals). At most {MARGIN:.0%} of the loss of a guess above"
        f" synchronous training in every cell: {_join(good)}. Significantly above it in every cell:"
        f" {_join(bad)}. In some cells: {_join(mixed)}."
    )


def claim_briefly(tables: Sequence[Table]) -> str:
    """Return the conclusion for a table of many results."""
    done = [table for table in tables if table.complete]
    if not done:
        return "no cell is complete yet"
    good, bad, _ = _sort_methods(done)
    return (
        f"at most {MARGIN:.0%} of a guess's loss higher in all {len(done)} cells: {_join(good)};"
        f" significantly higher: {_join(bad)}"
    )


def _sort_methods(done: Sequence[Table]) -> tuple[list[str], list[str], list[str]]:
    """Return the methods that are never worse, always worse, and the others with their share."""
    counts = count_verdicts(done)
    tested = {name: sum(found.values()) for name, found in counts.items()}
    good, bad, mixed = [], [], []
    for name, found in counts.items():
        few = f" ({tested[name]} of them)" if tested[name] < len(done) else ""
        if found["not worse"] + found["better"] == tested[name]:
            good.append(METHODS[name].label + few)
        elif found["worse"] == tested[name]:
            bad.append(METHODS[name].label + few)
        else:
            mixed.append(f"{METHODS[name].label} ({found['worse']} of {tested[name]})")
    return good, bad, mixed


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
