"""Seconds of a step in a steady state, on several processes. Imported by benchmarks, not run.

A pipeline that never drains has its warm-up behind it after the first steps; what a barrier between
two measurements makes it wait belongs to no step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def steady(step: Callable[[], object], steps: int, before: int = 2) -> float:
    """Seconds per step of the slowest rank, after ``before`` steps that are not measured."""
    import torch.distributed as dist

    dist.barrier()
    for _ in range(before):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return slowest((time.perf_counter() - start) / steps)


def slowest(seconds: float) -> float:
    """The largest of all ranks' numbers, on every rank."""
    import torch
    import torch.distributed as dist

    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def in_turn(
    steps: Mapping[str, Callable[[], object]],
    seconds: float,
    rounds: int,
    least: int = 1,
    before: int = 2,
) -> dict[str, list[float]]:
    """Seconds per step of each in every round, in turn, the order reversed every other round.

    seconds: that each takes in a round, about; at least ``least`` steps.
    """
    counts = {}
    for name, step in steps.items():
        steady(step, 1, 1)  # what is done once
        counts[name] = max(least, min(500, round(seconds / steady(step, 1, 1))))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in list(steps) if index % 2 == 0 else list(reversed(steps)):
            taken[name].append(steady(steps[name], counts[name], before))
    return taken


def middle(values: list[float]) -> float:
    """Milliseconds of the median."""
    return round(1e3 * statistics.median(values), 3)


def over(these: list[float], those: list[float]) -> float:
    """The median over the rounds of one's seconds by the other's."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))
