"""The methods that StaleBench compares: which weights they read, and with which optimizer.

A method reads weights by a row of `traces.read`, the oracle of the golden traces, or by one of the
rows here that it lacks: controls with a fixed look-ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from benchmarks.stalebench import traces
from benchmarks.stalebench.traces import Read


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    mode: of `traces.read`, or "ahead". label: in tables. microbatches: of an update. rule: of its
    prediction, "linear" or "difference". optimizer: instead of the cell's; it runs beside AdamW
    only. control: whether it is synchronous. compared: the control with the same look-ahead or
    optimizer, beside "sync".
    """

    label: str
    mode: str
    microbatches: int = 1
    rule: str = "linear"
    optimizer: str = ""
    control: bool = False
    compared: str = "sync"


SYNC = "sync"
METHODS: Mapping[str, Method] = {
    SYNC: Method("synchronous", "flush", control=True),
    "lookahead": Method("synchronous, SpecTrain's look-ahead", "lookahead", control=True),
    "ahead": Method(
        "synchronous, look-ahead by 1 update", "ahead", rule="difference", control=True
    ),
    "nadam": Method("synchronous, NAdam", "flush", optimizer="nadam", control=True),
    "stash": Method("stash (PipeDream)", "stash"),
    "naive": Method("naive", "naive"),
    "spectrain": Method("SpecTrain v1", "spectrain", compared="lookahead"),
    "spectrain-v2": Method("SpecTrain v2", "spectrain-v2", compared="lookahead"),
    "pipeoptim": Method("PipeOptim", "pipeoptim", compared="lookahead"),
    "difference": Method(
        "weight difference", "spectrain-v2", rule="difference", compared="lookahead"
    ),
    "pipemare": Method("PipeMare", "pipemare"),
    "nadam-stash": Method("NAdam with stash", "stash", optimizer="nadam", compared="nadam"),
    "2bw": Method("PipeDream-2BW", "2bw"),
    "2bw-ef": Method("2BW with error feedback", "2bw-ef", compared="ahead"),
    "paci": Method("PACI of 4 microbatches", "naive", microbatches=4),
    "stash-4": Method("stash of 4 microbatches", "stash", microbatches=4),
    "spectrain-4": Method("SpecTrain v2 of 4 microbatches", "spectrain-v2", microbatches=4),
}


@cache
def reads(method: str, stages: int, t: int) -> tuple[Read, ...]:
    """Return what microbatch t, counted from 1, reads on each stage."""
    of = METHODS[method]
    if of.mode == "ahead":
        return (Read(t - 1, 1),) * stages
    every = range(stages)
    return tuple(traces.read(of.mode, k, stages, of.microbatches, t) for k in every)


def staleness(method: str, stages: int) -> tuple[int, ...]:
    """Return by stage how many updates the gradient of a full pipeline misses, at most."""
    of, t = METHODS[method], 8 * stages
    rows = [reads(method, stages, t + i) for i in range(of.microbatches)]
    done = [(t + i - 1) // of.microbatches for i in range(of.microbatches)]
    return tuple(
        max(u - row[k].version for u, row in zip(done, rows, strict=True)) for k in range(stages)
    )
