"""Lower bounds on memory that hold for every choice."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

import numpy as np

from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.problem import (
    JointProblem,
    ParallelOption,
    ParameterFootprint,
    count_option_devices,
)
from fxpart.solver.joint.tables import JointTables

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


def list_min_unit_bytes(problem: JointProblem) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first and last block of each unit, the least bytes of its stage, and the memory.

    A unit is what no cut may divide. Bytes and memory are those of one device under the option with
    the smallest deficit (or largest surplus).
    """
    tables = JointTables(JointArrays(problem))
    stacked, runs = tables.stacked, tables.runs
    least: dict[int, tuple[int, int]] = {}
    for m in problem.microbatches:
        work = stacked.work(m)
        usable = np.flatnonzero(work >= 0)
        for cls in sorted({*runs.band[:, 0].tolist()} - {runs.count}) if len(usable) else ():
            whole = np.full(len(usable), cls)
            needs = sum(tables.bytes(usable, work[usable], whole), np.zeros_like(whole))
            room = stacked.memory[stacked.pool[usable]]
            best = int(np.argmin(needs - room))
            pair = int(needs[best]), int(room[best])
            if cls not in least or pair[0] - pair[1] < least[cls][0] - least[cls][1]:
                least[cls] = pair
    for unit, cls in enumerate(runs.band[:, 0].tolist()):
        if cls in least:
            yield int(runs.firsts[unit]), int(runs.lasts[unit]), *least[cls]
