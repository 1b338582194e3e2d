"""What copies of a stage need beside their gradients while these are summed, once a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.problem import Weight
from fxpart.solver.tables import Ints, Tables, interval_sums, largest, touching

PIECE = 25 << 20  # bytes, as fxpart.runtime.replicas has it


def while_copies_sum(gradients: Sequence[int]) -> int:
    """Bytes beside the gradients of a stage's copies while they are summed.

    gradients: bytes of each. The runtime (:mod:`fxpart.runtime.replicas`) packs pieces of at most
    25 MiB, one while another is sent; what is larger is sent as it is, and received whole.
    """
    return max(min(sum(gradients), 2 * PIECE), max(gradients, default=0))


def gradients_of(weights: Sequence[Weight], first: int, last: int) -> list[int]:
    """Bytes of the gradients of a group that holds these blocks."""
    return [w.gradient for w in weights if any(first <= block <= last for block in w.blocks)]


class Gradients:
    """Bytes of gradients of every interval of blocks, as bands of :class:`Tables`.

    total: of all; summing: what copies need beside them.
    """

    def __init__(self, tables: Tables) -> None:
        """Of the problem of the tables."""
        weights = [w for w in tables.problem.weights if w.gradient]
        n = len(tables.problem.blocks)
        held = [(r, w.gradient) for w in weights for r in touching(w.blocks, -1, n)]
        amounts = np.array([size for _, size in held], dtype=np.int64)
        self.total: Ints = tables.band(interval_sums(n, [r for r, _ in held], amounts))
        row: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        for weight in weights:
            for block in weight.blocks:
                row[block] = max(row[block], weight.gradient)
        most = tables.band(largest(row))
        self.summing: Ints = np.maximum(np.minimum(self.total, 2 * PIECE), most)
