"""What copies of a stage need beside their gradients while these are summed, once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.problem import Weight
from fxpart.solver.tables import (
    Ints,
    PartitionTables,
    interval_sums,
    largest,
    list_touching_rectangles,
)

PIECE = 25 << 20  # bytes, as fxpart.runtime.gradients.stage_replicas has it


def count_reduction_workspace(gradients: Sequence[int]) -> int:
    """Bytes beside the gradients of a stage's copies while they are summed.

    gradients: bytes of each. The runtime (:mod:`fxpart.runtime.gradients.stage_replicas`) packs
    pieces of at most 25 MiB, one while another is sent; what is larger is sent as it is, and
    received whole.
    """
    return max(min(sum(gradients), 2 * PIECE), max(gradients, default=0))


def compute_sparse_row_fraction(copies: int) -> float:
    """Of a sparse gradient's rows the part that is in a message, on average, of those of its sum.

    Of n copies n - 1 send theirs to one, 1/n of all, and are given all; of dense gradients they
    send and are given equally many bytes.
    """
    return (1 + 1 / copies) / 2


def list_group_weights(weights: Sequence[Weight], first: int, last: int) -> list[Weight]:
    """Those of a group that holds these blocks."""
    return [w for w in weights if any(first <= block <= last for block in w.blocks)]


class IntervalGradients:
    """Bytes of gradients of every interval of blocks, as bands of :class:`PartitionTables`.

    dense: of dense ones; rows: of sparse ones as they travel; summing: what copies need beside
    theirs while they are summed.
    """

    def __init__(self, tables: PartitionTables) -> None:
        """Of the problem of the tables."""
        weights = [w for w in tables.problem.weights if w.gradient]
        n = len(tables.problem.blocks)
        held = [(r, w) for w in weights for r in list_touching_rectangles(w.blocks, -1, n)]

        def band(of: Callable[[Weight], int]) -> Ints:
            amounts = np.array([of(w) for _, w in held], dtype=np.int64)
            return tables.band(interval_sums(n, [r for r, _ in held], amounts))

        self.dense = band(lambda w: 0 if w.sparse else w.gradient)
        self.rows = band(lambda w: w.rows)
        total = band(lambda w: w.gradient)
        row: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        for weight in weights:
            for block in weight.blocks:
                row[block] = max(row[block], weight.gradient)
        most = tables.band(largest(row))
        self.summing: Ints = np.maximum(np.minimum(total, 2 * PIECE), most)
