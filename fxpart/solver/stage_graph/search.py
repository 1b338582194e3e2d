"""Improvement of a stage graph by small moves, some of them uphill: simulated annealing.

A fixed number of moves with a fixed seed, so that equal problems give equal results unless the
deadline interrupts them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp

from fxpart.solver.stage_graph.block_graph import members
from fxpart.solver.stage_graph.tables import StageGraphTables
from fxpart.solver.work import work_seconds

_WARM, _COLD = 0.03, 0.0005  # accepted worsening, as a share of the step time, at start and end
_OVERFULL = 2.0  # penalty of a stage that exceeds its memory by 100 %, in step times


def improve(
    tables: StageGraphTables, stages: Sequence[int], *, moves: int, seed: int, deadline: float
) -> list[int]:
    """Return the best stages found, at least as good as the given ones; in topological order.

    stages: sets of blocks. A move puts a block on another stage or a new one, or swaps two.
    deadline: a ``work_seconds()`` value.
    """
    chance = random.Random(seed)
    now = list(stages)
    at = _score(tables, now)
    best, least = now, at
    for step in range(moves):
        if step % 64 == 0 and work_seconds() > deadline:
            break
        heat = _WARM * (_COLD / _WARM) ** (step / moves)
        moved = _moved(tables, now, chance)
        if moved is None:
            continue
        score = _score(tables, moved)
        if score <= at or chance.random() < exp((at - score) / (heat * least)):
            now, at = moved, score
            if score < least:
                best, least = moved, score
    return best


def _score(tables: StageGraphTables, stages: Sequence[int]) -> float:
    """Return the seconds, plus a penalty for exceeded memory."""
    over, seconds = tables.judge(stages)
    if not over:
        return seconds
    memory = sum(d.memory for d in tables.problem.devices[: len(stages)])
    return seconds * (1 + _OVERFULL * (0.1 + over / max(memory, 1)))


def _moved(
    tables: StageGraphTables, stages: Sequence[int], chance: random.Random
) -> list[int] | None:
    """Return a random adjacent solution, or None if the move is impossible."""
    low, high = tables.problem.min_stages, tables.problem.max_stages
    n = len(tables.graph.before)
    block = chance.randrange(n)
    source = next(k for k, blocks in enumerate(stages) if blocks >> block & 1)
    target = chance.randrange(min(len(stages) + 1, high))
    if target == source:
        return None
    changed = [*stages, 0] if target == len(stages) else list(stages)
    if chance.random() < 0.4 and changed[target]:
        other = chance.choice(list(members(changed[target])))
        changed[source] |= 1 << other
        changed[target] &= ~(1 << other)
    changed[source] &= ~(1 << block)
    changed[target] |= 1 << block
    changed = [blocks for blocks in changed if blocks]
    return tables.sorted(changed) if low <= len(changed) <= high else None
