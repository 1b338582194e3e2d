"""Weight copies of asynchronous stages, by the number of stages from each to the end.

A solver that proceeds from the last stage to the first knows the later stages, not the earlier
ones. Most weight modes need no more. For the others (vertical sync, SpecTrain's first rule) a stage
gets the copies of the deepest pipeline that the problem allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fxpart.schedule.versions import count_chain_warmup
from fxpart.solver.asynchronous.weight_mode_requirements import (
    compute_weight_mode_requirements,
    explain_unsupported_weight_mode,
)

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class WeightCopyCounts:
    """weights: the name of the weight mode. most: maximum number of stages of a pipeline."""

    weights: str
    most: int

    def extra(self, microbatches: int, to_end: int) -> int:
        """Return most copies besides the weights themselves with ``to_end`` stages to the end."""
        known = _extra(self.weights, self.limit(microbatches), microbatches)
        return known[min(to_end, len(known)) - 1]

    def limit(self, microbatches: int) -> int:
        """Return most stages that the mode supports: with a double buffer one per microbatch."""
        return _limit(self.weights, self.most, microbatches)

    def deepest(self, room: Bytes, each: Bytes, copy: Bytes, microbatches: int) -> Bytes:
        """Return the most stages to the end with which it fits; 0 if it never does.

        room: free bytes next to one copy of the weights. each: per microbatch in flight, of which
        there is one for each stage to the end. copy: of the weights.
        """
        known = _extra(self.weights, self.limit(microbatches), microbatches)
        found = np.zeros_like(room)
        first = 1
        while first <= len(known):
            extra, last = known[first - 1], first
            while last < len(known) and known[last] == extra:
                last += 1
            left = room - extra * copy
            depth = np.where(each > 0, left // np.maximum(each, 1), np.int64(last))
            depth = np.minimum(depth, last)
            found = np.where((left >= 0) & (depth >= first), depth, found)
            first = last + 1
        return np.asarray(found)


@lru_cache(maxsize=4096)
def _limit(weights: str, most: int, microbatches: int) -> int:
    limit = most
    while limit > 1 and explain_unsupported_weight_mode(
        weights, count_chain_warmup(limit), microbatches
    ):
        limit = min(limit - 1, max(1, microbatches))
    return limit


@lru_cache(maxsize=4096)
def _extra(weights: str, most: int, microbatches: int) -> tuple[int, ...]:
    """Return the copies by stages to the end, from 1 on; never decreasing."""
    ahead, found = count_chain_warmup(most), [0]
    for to_end in range(1, most + 1):
        copies = compute_weight_mode_requirements(
            weights, ahead, microbatches, most - to_end
        ).copies
        found.append(max(found[-1], copies))
    return tuple(found[1:])
