"""Any assignment: from the best chain, by squeezing the optimum between two bounds."""

from __future__ import annotations

from math import inf

from .blocks import Blocks
from .bounds import cheap_bound
from .record import PROVEN, MaxLoadRecord
from .reduce import reduce
from .watch import MaxLoadWatch

_MORE = 3.0  # times as much effort, where a round changed nothing
_PARTS = (1.0, 0.75, 0.5, 0.25)  # of the way from the bound to the best
_NEARER = 0.3  # times the gap that it was: reason to ask the last question again
_EPSILON = 0.9 * PROVEN  # a no so close to the best proves it


def search_any(blocks: Blocks, record: MaxLoadRecord, watch: MaxLoadWatch, seed: int) -> None:
    """Improve and prove as far as time allows. blocks: all of them, as :func:`make_blocks` gives.

    In rounds of rising effort (CP-SAT's deterministic time, about seconds): first the minimum is
    looked for; then it is asked whether loads below the best, or between it and the bound, are
    possible at all. A no lifts the bound, a yes lowers the best. Which question is the easiest
    cannot be foreseen; and the lower the load, the fewer nets can be cut.
    """
    from .any_ilp import solve_any

    effort = 1.0
    while not record.closed:
        fewer = reduce(blocks, record.objective)
        record.prove(cheap_bound(fewer))
        if record.closed:
            return
        limit = effort if record.objective < inf else inf
        record.prove(solve_any(fewer, record, watch, seed, limit))
        gap = inf  # between bound and best, when the last question was asked in vain
        while not record.closed:
            now = record.objective - record.bound
            parts = _PARTS if now < gap * _NEARER else _PARTS[1:]
            gap = now if parts is _PARTS else gap
            if not _ask(blocks, record, watch, seed, effort, parts):
                break
            seed += 1
        effort *= _MORE


def _ask(
    blocks: Blocks,
    record: MaxLoadRecord,
    watch: MaxLoadWatch,
    seed: int,
    effort: float,
    parts: tuple[float, ...],
) -> bool:
    """Questions until one of them changes the best or the bound; whether one did."""
    from .any_ilp import within

    before = record.objective, record.bound
    for part in parts:
        target = record.bound + part * (record.objective - record.bound)
        target = min(target, record.objective * (1 - _EPSILON))
        if within(reduce(blocks, target), record, watch, seed, target, effort):
            record.prove(target)
        if (record.objective, record.bound) != before:
            return True
    return False
