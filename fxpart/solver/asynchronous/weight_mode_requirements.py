"""Requirements of a weight mode for one stage of a full asynchronous pipeline.

Staleness, weight copies and predictions are counted from the schedule's version counters
(:mod:`fxpart.schedule.versions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fxpart.errors import FxpartError
from fxpart.schedule.versions import WeightVersionCounters
from fxpart.schedule.weight_copies import count_weight_copies
from fxpart.schedule.weight_modes import WeightMode, weight_mode


@dataclass(frozen=True)
class WeightModeRequirements:
    """Requirements of one stage.

    staleness: the most updates applied between a forward and its backward. copies: simultaneous
    sets of the stage's trained weights besides the parameters, predicted ones included. passes: how
    often per minibatch a set is made from the parameters and the state of the optimizer (or of a
    correction).
    """

    staleness: int
    copies: int
    passes: int


@lru_cache(maxsize=65536)
def compute_weight_mode_requirements(
    mode: str, ahead: tuple[int, ...], every: int, stage: int
) -> WeightModeRequirements:
    """Return the requirements of a mode for a stage; ahead, every: see
    :class:`WeightVersionCounters`."""
    found, versions = weight_mode(mode), WeightVersionCounters(ahead, every)
    return WeightModeRequirements(
        staleness=versions.gap(stage),
        copies=count_weight_copies(found, versions, stage).extra,
        passes=_passes(found, versions, stage),
    )


@lru_cache(maxsize=4096)
def explain_unsupported_weight_mode(mode: str, ahead: tuple[int, ...], every: int) -> str:
    """Return why the mode does not support this asynchronous pipeline; "" if it does."""
    try:
        WeightVersionCounters(ahead, every).check(weight_mode(mode))
    except FxpartError as wrong:
        return wrong.problems[0].why
    return ""


def _passes(mode: WeightMode, versions: WeightVersionCounters, stage: int) -> int:
    """Return the sets of weights made per minibatch of the full pipeline.

    A set serves every computation that predicts equally far from the same version, as long as one
    of them is next (the next forward or the next backward); sets that backwards read again are
    stored until then. A correction costs one more set per update, for its running mean (PipeMare,
    T2); so does error feedback.
    """
    period, every = versions.period(), versions.every
    if mode.backward == "forward":
        reads = [versions.read(mode, stage, i) for i in period]
        made_ahead = {(read.version, read.look_forward) for read in reads if read.look_forward}
        return len(made_ahead) + (mode.feedback != 0 and max(versions.ahead) > 1)
    order = [
        source
        for i in range(period.start - every, period.stop + 1)
        for source in _sources(mode, versions, stage, i)
    ]
    made, held = [False] * len(order), (0, 0)
    for at, (version, look) in enumerate(order[:-2]):
        if look and (version, look) != held:
            made[at], held = True, (version, look)
        if held not in order[at + 1 : at + 3]:  # the next of each kind
            held = (0, 0)
    mean = mode.backward == "corrected" and versions.gap(stage) > 0
    return sum(made[2 * every : 4 * every]) + mean


def _sources(
    mode: WeightMode, versions: WeightVersionCounters, stage: int, microbatch: int
) -> Iterator[tuple[int, int]]:
    """Return (version, distance) of a backward and of the forward that follows it on the stage."""
    back = versions.read(mode, stage, microbatch)
    corrected = mode.backward == "corrected"
    yield back.backward, -back.staleness if corrected else back.look_backward
    then = versions.read(mode, stage, microbatch + versions.ahead[stage])
    yield then.version, then.look_forward


def count_prediction_bytes(mode: str, weight: int, optimizer: int) -> int:
    """Return the bytes moved to make one set: weights and state are read, weights are written.

    weight, optimizer: bytes of the trained weights and of their optimizer state. A correction reads
    its running mean, as large as the weights, instead of the state; error feedback reads and writes
    the last update and reads the weights before it.
    """
    if weight_mode(mode).feedback:
        return 5 * weight
    other = weight if weight_mode(mode).backward == "corrected" else optimizer
    return 2 * weight + other
