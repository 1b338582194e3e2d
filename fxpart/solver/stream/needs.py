"""What a weight mode asks of one stage of a full stream: staleness, weight copies, predictions.

Everything is counted from the schedule's version counters (:mod:`fxpart.schedule.versions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fxpart.errors import FxpartError
from fxpart.schedule.copies import copies
from fxpart.schedule.versions import Versions
from fxpart.schedule.weight_modes import WeightMode, weight_mode


@dataclass(frozen=True)
class Needs:
    """Of one stage. staleness: the most updates applied between a forward and its backward.

    copies: sets of the stage's trained weights held at once beside the parameters, predicted ones
    included. passes: how often in a minibatch a set is made from the parameters and from what the
    optimizer, or a correction, keeps beside them.
    """

    staleness: int
    copies: int
    passes: int


@lru_cache(maxsize=65536)
def needs(mode: str, ahead: tuple[int, ...], every: int, stage: int) -> Needs:
    """What the mode of this name asks of a stage; ahead, every: as :class:`Versions` has them."""
    found, versions = weight_mode(mode), Versions(ahead, every)
    return Needs(
        staleness=versions.gap(stage),
        copies=copies(found, versions, stage).extra,
        passes=_passes(found, versions, stage),
    )


@lru_cache(maxsize=4096)
def fault(mode: str, ahead: tuple[int, ...], every: int) -> str:
    """Why the mode is not made for such a stream, in words; "" where it is."""
    try:
        Versions(ahead, every).check(weight_mode(mode))
    except FxpartError as wrong:
        return wrong.problems[0].why
    return ""


def _passes(mode: WeightMode, versions: Versions, stage: int) -> int:
    """Sets of weights made in a minibatch.

    One for each computation that looks ahead; what the backward sees again is made once for all
    microbatches that look equally far from the same version. A correction costs one for each stale
    backward, and one at the update for its running mean (PipeMare, T2).
    """
    reads = [versions.read(mode, stage, i) for i in versions.period()]
    ahead = [(read.version, read.look_forward) for read in reads if read.look_forward]
    if mode.backward == "forward":
        return len(set(ahead))
    if mode.backward == "corrected":
        stale = sum(read.staleness > 0 for read in reads)
        return len(ahead) + stale + (stale > 0)
    return len(ahead) + sum(read.look_backward > 0 for read in reads)


def pass_bytes(mode: str, weight: int, optimizer: int) -> int:
    """Bytes read and written to make one set: weights and state are read, weights are written.

    weight, optimizer: bytes of the trained weights and of what the optimizer keeps for them. A
    correction reads its running mean, as large as the weights, instead of the state.
    """
    other = weight if weight_mode(mode).backward == "corrected" else optimizer
    return 2 * weight + other
