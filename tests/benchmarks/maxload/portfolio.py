"""The one entrance: the best assignment within a time limit, with a proven bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from fxpart.errors import error

from .blocks import make_blocks
from .bounds import cheap_bound
from .brute import solve_brute
from .chain import prove_by_ideals, start
from .checks import check_instance
from .instance import MODES, Instance, MaxLoadAnswer, Mode
from .loose import search_any
from .record import MaxLoadRecord, Progress
from .watch import MaxLoadOutOfTime, MaxLoadWatch, never

Solver = Literal["auto", "dp", "cp-sat", "brute"]
_IDEALS_SHARE = 0.7  # of the time, at most, before the integer programme takes over
_CHAIN_SHARE = 0.4  # of the time, at most, goes into the chain that any assignment starts from


def solve(
    instance: Instance,
    *,
    mode: Mode = "chain",
    solver: str = "auto",
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    stopped: Callable[[], bool] = never,
) -> MaxLoadAnswer:
    """The best assignment found within ``time_limit`` seconds and its proven lower bound.

    mode "chain": the devices form a pipeline, in any topological order; "any": a device may hold
    several pieces. solver "dp" is the dynamic programme over ideals, which proves chains fast but
    gives "any" no better than a chain and a cheap bound; "cp-sat" the integer programme; "auto"
    takes "dp" for chains unless there are too many ideals, and "cp-sat" for any. ``stopped`` is
    asked now and then whether to answer with what there is. Equal instances and seeds give equal
    answers as long as the time limit is not reached. Raises FXP206 for an instance that is not
    valid, FXP109 for an unknown mode, solver or time limit.
    """
    watch = MaxLoadWatch(time.monotonic() + time_limit, stopped)
    if mode not in MODES or solver not in get_args(Solver) or not time_limit >= 0:
        raise error(
            "FXP109",
            where=f"solve(mode={mode!r}, solver={solver!r}, time_limit={time_limit!r})",
            why="one of these is not known, or the time limit is negative",
            fix="mode 'chain' or 'any'; solver 'auto', 'dp', 'cp-sat' or 'brute'; 0 s or more",
        )
    check_instance(instance)
    if solver == "brute":
        return solve_brute(instance, mode)
    record = MaxLoadRecord(instance, mode, progress)
    try:
        used = _chain(record, watch, seed, solver) if mode == "chain" else ""
        if mode == "any":
            used = _any(record, watch, seed, solver)
    except MaxLoadOutOfTime:
        used = solver if solver != "auto" else "dp" if mode == "chain" else "cp-sat"
    return record.answer(used)


def _chain(record: MaxLoadRecord, watch: MaxLoadWatch, seed: int, solver: str) -> str:
    """Fill the record; the name of the solver that had the last word."""
    blocks = start(record, watch, seed)
    if record.closed:
        return "dp"
    if solver == "dp":
        prove_by_ideals(blocks, record, watch)
        return "dp"
    if solver == "auto":
        try:
            if prove_by_ideals(blocks, record, watch.part(_IDEALS_SHARE)):
                return "dp"
        except MaxLoadOutOfTime:
            watch.left()  # the other solver has the rest
    from .chain_ilp import solve_chain  # OR-Tools is slow to import

    record.prove(solve_chain(blocks, record, watch, seed))
    return "cp-sat"


def _any(record: MaxLoadRecord, watch: MaxLoadWatch, seed: int, solver: str) -> str:
    blocks = make_blocks(record.instance, "any")
    record.prove(cheap_bound(blocks))
    # a chain is valid here too, but what is proven of chains is not
    try:
        chain = MaxLoadRecord(record.instance, "chain")
        _chain(chain, watch.part(_CHAIN_SHARE), seed, "cp-sat" if solver == "cp-sat" else "dp")
    except MaxLoadOutOfTime:
        watch.left()
    finally:
        if chain.assignment is not None:
            record.add(chain.assignment)
    if record.closed or solver == "dp":
        return "dp"
    search_any(blocks, record, watch, seed)
    return "cp-sat"
