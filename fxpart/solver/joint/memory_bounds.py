"""Lower bounds on memory that hold for every choice."""

from __future__ import annotations

from math import floor

import numpy as np

from fxpart.solver.joint.intervals import IntervalTables
from fxpart.solver.joint.problem import (
    JointProblem,
    ParallelOption,
    ParameterFootprint,
    count_option_devices,
)

_CUT_FROM = {"weight": 3, "gradient": 2, "optimizer": 1}  # ZeRO levels


def compute_min_state_bytes(problem: JointProblem) -> int:
    """Return the minimum bytes of parameters, gradients, optimizer state and buffers on all
    devices.

    The minimum over the options for each block, on all of a stage's devices, rounded down.
    """
    rows = [_spread(problem, option) for option in problem.options if _can(problem, option)]
    if not rows:
        return 0
    by_kind = np.min(rows, axis=0)
    return floor(float(by_kind[list(problem.kinds)].sum()) * (1 - 1e-9))


def _can(problem: JointProblem, option: ParallelOption) -> bool:
    return count_option_devices(problem, option) <= problem.pools[option.pool].devices


def _spread(problem: JointProblem, option: ParallelOption) -> list[float]:
    """Return bytes by kind on all devices of a stage with this option."""
    layout = problem.layouts[option.layout]
    shares = dict(zip(("dense", "experts"), option.shards(layout), strict=True))
    total = [float(b) for b in layout.buffer]
    for name, share in shares.items():
        state: ParameterFootprint | None = getattr(layout, name)
        for part, level in _CUT_FROM.items() if state is not None else ():
            cut = share if option.zero >= level else 1
            total = [a + b / cut for a, b in zip(total, getattr(state, part), strict=True)]
    return [count_option_devices(problem, option) * b for b in total]


def compute_min_block_bytes(problem: JointProblem) -> list[tuple[int, int]]:
    """Return by block the minimum bytes of its stage on one device, and the device's memory.

    For the option with the smallest deficit (or largest surplus).
    """
    tables, n = IntervalTables(problem), len(problem.blocks)
    best: list[tuple[int, int] | None] = [None] * n
    for m in problem.microbatches:
        for index, option in enumerate(problem.options):
            sizes = tables.sizes(index, m) if _can(problem, option) else None
            work = tables.scorer.work(option, m)
            if sizes is None or work is None:
                continue
            room = problem.pools[option.pool].memory
            for b in range(n):
                need = int(sizes.standing[b, b]) + work.activation[problem.kinds[b]]
                known = best[b]
                if known is None or need - room < known[0] - known[1]:
                    best[b] = (need, room)
    return [pair or (0, 0) for pair in best]
