"""Additional memory of replicas during their gradient reduction per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.problem import Weight
from fxpart.solver.tables import (
    Ints,
    PartitionTables,
    largest,
    list_touching_rectangles,
)

PIECE = 25 << 20  # bytes, as in fxpart.runtime.gradients.stage_replicas


def count_reduction_workspace(gradients: Sequence[int]) -> int:
    """Return the bytes besides the gradients of a stage's replicas during their reduction.

    gradients: bytes of each. The runtime (:mod:`fxpart.runtime.gradients.stage_replicas`) packs
    buckets of at most 25 MiB, one while another is sent; larger gradients are sent unpacked, and
    received in full.
    """
    return max(min(sum(gradients), 2 * PIECE), max(gradients, default=0))


def compute_sparse_row_fraction(copies: int) -> float:
    """Return the mean fraction of a reduced sparse gradient's rows that is in one message.

    Of n replicas, n - 1 send their 1/n of the rows to one, and receive all of them; with dense
    gradients both messages have equal size.
    """
    return (1 + 1 / copies) / 2


def list_group_weights(weights: Sequence[Weight], first: int, last: int) -> list[Weight]:
    """Return the weights of a group with these blocks."""
    return [w for w in weights if any(first <= block <= last for block in w.blocks)]


class IntervalGradients:
    """Bytes of gradients of every interval of blocks, as bands of :class:`PartitionTables`.

    dense: of dense ones; rows: of sparse ones in messages; summing: additional memory of replicas
    during the reduction.
    """

    def __init__(self, tables: PartitionTables) -> None:
        """Compute the bands for the problem of the tables."""
        weights = [w for w in tables.problem.weights if w.gradient]
        n = len(tables.problem.blocks)
        held = [(r, w) for w in weights for r in list_touching_rectangles(w.blocks, -1, n)]

        def band(of: Callable[[Weight], int]) -> Ints:
            return tables.sums((r, of(w)) for r, w in held)

        self.dense = band(lambda w: 0 if w.sparse else w.gradient)
        self.rows = band(lambda w: w.rows)
        total = band(lambda w: w.gradient)
        row: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        for weight in weights:
            for block in weight.blocks:
                row[block] = max(row[block], weight.gradient)
        most = tables.to_band(largest(row))
        self.summing: Ints = np.maximum(np.minimum(total, 2 * PIECE), most)
