"""Which runs StaleBench makes, in which order, and what they cost; no torch, no data.

A cell is a task, an optimizer and a number of stages. The full product of tasks, optimizers and
stages is not run: CELLS is a fraction of it, the most useful cells first, with some of the methods
where a run is long. In a cell every method gets five learning rates on two pilot seeds, chosen by
the validation loss:

1. a middle rate, a quarter of it and four times as much;
2. half and twice the best; or, if it is the smallest or largest so far, two more on that side;
3. where the best is still the smallest or largest, two more on that side. After that the method
   is marked as at the edge of its grid.

Then eight other seeds run at the best rate, all methods with the same weights and batches. Runs are
trained together in chunks, a chunk of final runs with all methods at the same seeds, so that a
benchmark that is stopped has as many seeds of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.stalebench.methods import METHODS

PILOTS, FINALS = (100, 101), tuple(range(8))
WARM_UP, FLOOR, CLIP = 0.05, 0.1, 1.0  # part of the updates, part of the rate, norm
COARSE, FINE, ROUNDS = 4.0, 2.0, 3


class Cell(NamedTuple):
    """A task, an optimizer and a number of stages."""

    task: str
    optimizer: str
    stages: int

    @property
    def key(self) -> str:
        """Return its name in the results."""
        return f"{self.task} {self.optimizer} {self.stages}"


CELLS = (
    Cell("digits", "adamw", 8), Cell("clicks", "adagrad", 8), Cell("digits", "sgd", 8),
    Cell("digits", "adamw", 32), Cell("digits", "muon", 8), Cell("digits", "adamw", 4),
    Cell("images", "adamw", 8), Cell("digits", "adamw", 16), Cell("digits", "sgd", 32),
    Cell("clicks", "adamw", 8), Cell("source", "adamw", 8), Cell("digits", "muon", 32),
    Cell("clicks", "adagrad", 16), Cell("images", "sgd", 16), Cell("source", "sgd", 8),
    Cell("digits", "sgd", 4), Cell("digits", "sgd", 16), Cell("clicks", "sgd", 4),
    Cell("images", "muon", 8), Cell("source", "adamw", 16), Cell("source", "muon", 8),
)  # fmt: skip

# Methods of the larger tasks; the others take all that differ under their optimizer.
SOME = ("sync", "lookahead", "ahead", "stash", "spectrain", "2bw", "2bw-ef")
TOGETHER = {"digits": 26, "clicks": 26, "images": 13, "source": 4}
# Milliseconds of an update of one run among those together, measured on a core that others used.
MILLISECONDS = {"digits": 2.1, "clicks": 2.0, "images": 16.0, "source": 190.0}
FACTORS = {"muon": 2.5}  # of those, by optimizer


@dataclass(frozen=True)
class Chunk:
    """Runs of a cell that are trained together: (method, rate, seed), sorted."""

    cell: Cell
    runs: tuple[tuple[str, float, int], ...]
    final: bool

    @property
    def keys(self) -> frozenset[Key]:
        """Return the runs as the results name them."""
        return frozenset((name_runs(self.cell, m, rate), seed) for m, rate, seed in self.runs)

    @property
    def optimizer(self) -> str:
        """Return the optimizer of its methods."""
        return METHODS[self.runs[0][0]].optimizer or self.cell.optimizer


def list_methods(cell: Cell) -> tuple[str, ...]:
    """Return the methods of a cell."""
    if cell.task in ("images", "source"):
        return SOME
    names = [n for n, m in METHODS.items() if not m.optimizer or cell.optimizer == "adamw"]
    if cell.optimizer in ("muon", "adagrad"):  # Its linear prediction is the weight difference.
        names.remove("difference")
    return tuple(names)


def group(names: Sequence[str]) -> list[list[str]]:
    """Return the methods that can be trained together, the largest group first."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in names:
        method = METHODS[name]
        found.setdefault((method.optimizer, method.microbatches), []).append(name)
    return sorted(found.values(), key=len, reverse=True)


# -- learning rates -------------------------------------------------------------------------------

Scores = Mapping[float, float]  # mean validation loss of the pilot seeds by learning rate


def best(scores: Scores) -> float:
    """Return the rate with the smallest loss, the smaller rate of equal ones."""
    return min(sorted(scores), key=scores.__getitem__)


def is_at_edge(scores: Scores) -> bool:
    """Return whether the best rate is the smallest or the largest."""
    return best(scores) in (min(scores), max(scores))


def propose(middle: float, scores: Scores, tried: int) -> tuple[float, ...]:
    """Return the rates of round ``tried`` from 0, given the scores of the rounds before."""
    if tried == 0:
        return middle / COARSE, middle, middle * COARSE
    at = best(scores)
    if not is_at_edge(scores):
        return (at / FINE, at * FINE) if tried == 1 else ()
    factor = 1 / FINE if at == min(scores) else FINE
    return at * factor, at * factor * factor


# -- results --------------------------------------------------------------------------------------

Runs = Mapping[str, Any]  # "CELL METHOD RATE" to {seed: result}
Key = tuple[str, int]  # "CELL METHOD RATE" and seed


def name_runs(cell: Cell, method: str, rate: float) -> str:
    """Return the key of the runs of a method at a rate."""
    return f"{cell.key} {method} {rate:.5g}"


def get_pilots(runs: Runs, cell: Cell, method: str, rates: Iterable[float]) -> Scores | None:
    """Return the scores of these rates, infinite where a pilot diverged; None if one is missing."""
    found = {}
    for rate in rates:
        mine = runs.get(name_runs(cell, method, rate), {})
        values = [mine.get(str(seed)) for seed in PILOTS]
        if None in values:
            return None
        losses = [math.inf if value[0] is None else value[0] for value in values if value]
        found[rate] = sum(losses) / len(losses)
    return found


def tune(
    runs: Runs, cell: Cell, method: str, middle: float
) -> tuple[dict[float, float], list[float]]:
    """Return the scores of all rounds so far, and the rates that are to be tried next."""
    scores: dict[float, float] = {}
    for tried in range(ROUNDS):
        rates = propose(middle, scores, tried)
        found = get_pilots(runs, cell, method, rates)
        if found is None:
            return scores, list(rates)
        scores |= found
    return scores, []


def list_ready(
    runs: Runs, cell: Cell, middle: float, busy: Collection[Key] = ()
) -> Iterator[Chunk]:
    """Yield the chunks of a cell that can be trained now. busy: runs that are being trained."""
    for names in group(list_methods(cell)):
        tuned = {name: tune(runs, cell, name, middle) for name in names}
        pilots = [
            (name, rate, seed)
            for seed in PILOTS
            for name, (_, rates) in tuned.items()
            for rate in rates
        ]
        at = {name: best(scores) for name, (scores, _) in tuned.items() if scores}
        wanted = pilots or [(name, at[name], seed) for seed in FINALS for name in names]
        missing = [
            (name, rate, seed)
            for name, rate, seed in wanted
            if str(seed) not in runs.get(key := name_runs(cell, name, rate), {})
            and (key, seed) not in busy
        ]
        size = TOGETHER[cell.task]
        if not pilots:  # All methods at the same seeds.
            size = max(1, size // len(names)) * len(names) if len(names) <= size else size
        for first in range(0, len(missing), size):
            yield Chunk(cell, tuple(sorted(missing[first : first + size])), final=not pilots)


def count_runs(cell: Cell) -> int:
    """Return the runs of a cell without extensions of the grid."""
    return len(list_methods(cell)) * (5 * len(PILOTS) + len(FINALS))


def estimate(cell: Cell, steps: int, measured: Mapping[str, Any]) -> float:
    """Return the CPU seconds of a cell, as measured in it or by task and optimizer."""
    work = sum(
        (5 * len(PILOTS) + len(FINALS)) * (3 if METHODS[n].microbatches > 1 else 1)
        for n in list_methods(cell)
    )
    if cell.key in measured:
        seconds, done = measured[cell.key]
        return max(seconds, seconds / done * count_runs(cell))
    return work * steps * MILLISECONDS[cell.task] * FACTORS.get(cell.optimizer, 1.0) / 1e3
