"""Rounds of short blocks: two runtimes in turn, and one of them recorded. Used by pipelining.py.

There are as many rounds as are asked for, and more where the ratio of the two is not known to a
hundredth by then, which it is not where a step takes seconds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelining import Pair

SURE = 0.01  # of the ratio of two runtimes
MORE = 90.0  # seconds of more rounds, for that

Stages = tuple[list[float], list[float]]  # seconds of each stage's forward, and of its backward


def timed(step: Callable[[], object], steps: int) -> float:
    """Seconds per step until all ranks are done."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round, in turn, the order reversed every other round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs) if index % 2 == 0 else list(reversed(runs)):
            taken[name].append(runs[name]())
    return taken


def unsure(ratios: list[float]) -> float:
    """Half the width of the interval that holds the true median in 19 of 20 cases, relative.

    By order statistics: between the places n / 2 -+ 0.98 sqrt(n) of the sorted values. Of a number
    of ratios that was fixed beforehand: where one stops because it is narrow, it holds less often.
    """
    found, n = sorted(ratios), len(ratios)
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach) - 1)
    return (found[high] - found[low]) / 2 / statistics.median(found)


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median over the rounds of slow / fast."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 4)


def repeats(step: float, seconds: float) -> int:
    """How many steps of the slowest rank's time fill the seconds; the same on every rank."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor([step])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(200, round(seconds / slowest.item())))


class Rounds:
    """Rounds of a schedule: fxpart, torch, and fxpart again while its computations are recorded."""

    def __init__(self, pair: Pair, name: str, seconds: float, rounds: int) -> None:
        steps = {"fxpart": pair.fxpart(name), "torch": pair.torch(name)}
        for step in steps.values():
            timed(step, 3)
        count = repeats(timed(steps["fxpart"], 2), seconds)
        self.stages: list[Stages] = []

        def recorded() -> float:
            taken, stages = pair.recorded(name, count)
            self.stages.append(stages)
            return taken

        runs = {n: partial(timed, step, count) for n, step in steps.items()}
        self.taken = alternate({**runs, "recorded": recorded}, rounds)
        start = time.perf_counter()
        while not self._sure(time.perf_counter() - start):
            for runtime, taken in alternate(runs, 2).items():
                self.taken[runtime] += taken

    def _sure(self, since: float) -> bool:
        """Whether the ratio is known to SURE, or MORE seconds have passed; rank 0 decides."""
        import torch
        import torch.distributed as dist

        sure = since > MORE or self.unsure() < SURE
        told = torch.tensor([float(sure)])
        dist.broadcast(told, 0)
        return bool(told.item())

    def unsure(self) -> float:
        """How far the ratio of throughputs may be off, relative."""
        pairs = zip(self.taken["torch"], self.taken["fxpart"], strict=True)
        return round(unsure([torch / fxpart for torch, fxpart in pairs]), 4)

    def step(self, unit: float) -> dict[str, float]:
        """The median step of both, in parts of a second."""
        return {n: statistics.median(self.taken[n]) / unit for n in ("fxpart", "torch")}

    def over(self) -> float:
        """fxpart's throughput over torch's."""
        return ratio(self.taken["torch"], self.taken["fxpart"])
