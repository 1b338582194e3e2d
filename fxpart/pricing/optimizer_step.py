"""What an optimizer's step reads, writes and calls: counts by class at one rate, before factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpart.solver.problem import Weight

RATE = 15e9  # bytes/s, and
CALL = 3e-6  # seconds: of memory and of one tensor, before any factor
# Classes of work, as calibrations name them: of dense tensors, and of tables with sparse gradients.
UPDATE, TENSORS = "bytes optimizer", "tensors optimizer"
TOUCHED, ROWS, TABLES = "touched optimizer", "rows optimizer", "tables optimizer"
# A dense tensor is updated by some eight calls (AdamW has those), a table by some twenty small
# ones. Rows that came in any order are sorted and summed; those of one microbatch were merged with
# those before it one row after the other (ATen's sum of sparse tensors). Rows of a table lie apart,
# so that reading and writing them takes about four times what their bytes take in a row.
_DENSE_CALLS, _CALLS, _SORTED, _MERGED, _APART = 8, 20, 16, 7, 4
# To keep what a microbatch adds to a table apart, and to join it to what others added, takes about
# what sixteen small calls do.
_JOINED = 16


def update_parts(
    weights: Sequence[Weight], share: float = 1.0, microbatches: int = 1
) -> dict[str, float]:
    """Seconds of the optimizer's step, by class, before factors.

    Weight, gradient and state are read, weight and state written; of a table with a sparse gradient
    the rows that a step asks for. share: of a batch's rows the part that the step has, in
    ``microbatches`` equal ones.
    """
    held = [w for w in weights if w.gradient]
    tables = [w for w in held if w.sparse]
    dense = [w for w in held if not w.sparse]
    found = {
        UPDATE: sum(compute_update_bytes(w) for w in dense) / RATE,
        TENSORS: _DENSE_CALLS * len(dense) * CALL,
    }
    if tables:
        rows = share * sum(w.rows for w in tables)
        merged = merge_seconds(rows, microbatches) * microbatches
        found |= {
            TOUCHED: _APART * sum(compute_update_bytes(w, share) for w in tables) / RATE,
            ROWS: _SORTED * rows / RATE + merged,
            TABLES: _CALLS * len(tables) * CALL,
        }
    return found


def merge_seconds(rows: float, microbatches: int) -> float:
    """Seconds for each of so many equal microbatches that their rows take to be put together.

    rows: bytes of all. Those of the i-th are merged with the i - 1 before it, i/m of all, i = 2 to
    m: (m + 1)/2 - 1/m times all of them.
    """
    times = (microbatches + 1) / 2 - 1 / microbatches
    return _MERGED * times * rows / RATE / microbatches


def join_seconds(tables: int) -> float:
    """Seconds for each microbatch of the calls by which rows of so many tables are joined."""
    return _JOINED * tables * CALL


def compute_update_bytes(weight: Weight, share: float = 1.0) -> float:
    """Bytes that the optimizer reads and writes of a parameter that has a gradient.

    Of a table with a sparse gradient those of the rows that so much of a batch asks for, each once
    however often: of n that are asked for at random N (1 - exp(-n / N)) of N are different.
    """
    whole = 2 * weight.weight + 2 * weight.optimizer
    if not weight.sparse:
        return whole + weight.gradient
    part = -math.expm1(-share * weight.rows / max(1, weight.weight))
    return part * (whole + weight.weight)
