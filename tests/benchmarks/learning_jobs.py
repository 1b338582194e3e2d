"""Which runs `learning.py` makes, and which of them are tuned; no torch, no data.

Imported by the benchmarks beside it, not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STAGES = (4, 8)
CUT = "-cut"  # ends the name of a task whose batches are cut into as many microbatches as stages
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Method:
    """A row of the tables: a weight mode, and with which optimizers and microbatches it runs.

    microbatches: of a batch, given the stages. Most update after every backward, which is where
    staleness is largest. 2BW needs as many microbatches as stages. XPipe with one is SpecTrain v2.
    """

    weights: str
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    microbatches: Callable[[int], int] = lambda stages: 1


METHODS: Mapping[str, Method] = {
    "sync": Method("flush"),
    "lookahead": Method("lookahead"),
    "stash": Method("stash"),
    "naive": Method("naive"),
    "spectrain": Method("spectrain"),
    "spectrain-v2": Method("spectrain-v2"),
    "pipeoptim": Method("pipeoptim"),
    "xpipe": Method("xpipe", microbatches=lambda stages: 2),
    "2bw": Method("2bw", microbatches=lambda stages: stages),
    "pipemare": Method("pipemare"),
    "nadam-stash": Method("nadam-stash", optimizers=("nadam",)),
}


@dataclass(frozen=True, order=True)
class Job:
    """One run. stages: 1 for the synchronous one, which is the same at any number of them."""

    task: str
    stages: int
    microbatches: int
    seed: int
    method: str
    optimizer: str
    rate: float

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.task} {self.method} {self.stages} {self.optimizer} {self.rate:g} {self.seed}"


def configurations(names: Iterable[str]) -> Iterator[Job]:
    """Every task, method, number of stages and optimizer, each as its run at rate 0 and seed 0."""
    for name in names:
        for label, method in METHODS.items():
            for stages in (1,) if label == "sync" else STAGES:
                count = stages if name.endswith(CUT) else method.microbatches(stages)
                for optimizer in method.optimizers:
                    yield Job(name, stages, count, 0, label, optimizer, 0.0)


def at(job: Job, rate: float, seed: int) -> Job:
    """The run of a configuration at a rate and a seed."""
    return Job(**{**asdict(job), "rate": rate, "seed": seed})


def best_rate(job: Job, grid: Sequence[float], runs: Mapping[str, Any]) -> float | None:
    """The rate of the grid with the smallest loss of seed 0; None while runs are missing."""
    found = [runs.get(at(job, rate, SEEDS[0]).key) for rate in grid]
    if None in found:
        return None
    return min(zip(grid, found, strict=True), key=lambda pair: loss_of(pair[1]))[0]


def loss_of(run: Mapping[str, Any]) -> float:
    """The final validation loss; infinite where the run diverged."""
    return math.inf if run["loss"] is None else float(run["loss"])
