"""Simulated seconds of an update, by fxpart's simulator: equal stages, free transfers.

One unit is the forward and backward of the whole batch on one stage; a backward takes twice as long
as a forward. Asynchronous methods run without flushes, once the pipeline is full.
"""

from __future__ import annotations

from fxpart.schedule.dependence import chain
from fxpart.schedule.make import make
from fxpart.schedule.multi_step import simulate_steps

PER_STAGE = (1, 4)  # microbatches of the synchronous batch per stage
_STEPS = 2


def simulate(stages: int, microbatches: int, *, flush: bool) -> float:
    """Return the seconds of an update of a batch in so many microbatches."""
    edges = chain(stages)
    forward, backward = [1 / 3 / microbatches] * stages, [2 / 3 / microbatches] * stages
    schedule = make("1f1b", range(stages), microbatches, edges)
    steps = _STEPS if flush else _STEPS + stages
    return simulate_steps(schedule, steps, edges, forward, backward, flush=flush).steady_seconds


def simulate_all(stages: int) -> list[float]:
    """Return the seconds of synchronous updates, as of PER_STAGE, and of asynchronous ones."""
    sync = [simulate(stages, each * stages, flush=True) for each in PER_STAGE]
    return [round(value, 5) for value in (*sync, simulate(stages, 1, flush=False))]
