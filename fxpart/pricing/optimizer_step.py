"""Bytes and calls of an optimizer step by class, at one rate, before calibration factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpart.solver.problem import Weight

RATE = 15e9  # bytes/s of memory, before any factor
CALL = 3e-6  # seconds per tensor, before any factor
# Classes of work, as named by calibrations: dense tensors, and tables with sparse gradients.
UPDATE, TENSORS = "bytes optimizer", "tensors optimizer"
TOUCHED, ROWS, TABLES = "touched optimizer", "rows optimizer", "tables optimizer"
# A dense tensor is updated by about eight calls (as AdamW does), a table by about twenty small
# ones. Unordered rows are sorted and summed; those of one microbatch were merged with
# earlier ones row by row (ATen's sum of sparse tensors). Rows of a table are not contiguous,
# so that reading and writing them takes about four times as long as contiguous bytes.
_DENSE_CALLS, _CALLS, _SORTED, _MERGED, _APART = 8, 20, 16, 7, 4
# Storing the rows that a microbatch adds to a table and joining them to other rows takes about
# as long as sixteen small calls.
_JOINED = 16


def update_parts(
    weights: Sequence[Weight], share: float = 1.0, microbatches: int = 1
) -> dict[str, float]:
    """Return the seconds of the optimizer step, by class, before factors.

    Weight, gradient and state are read, weight and state written; of a table with a sparse gradient
    only the rows of the step. share: fraction of a batch's rows in the step, in ``microbatches``
    equal parts.
    """
    trained = [w for w in weights if w.gradient]
    tables = [w for w in trained if w.sparse]
    dense = [w for w in trained if not w.sparse]
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
    """Return the seconds per microbatch to merge the table rows of equal microbatches.

    rows: bytes of all. Those of the i-th are merged with the i - 1 before it, i/m of all, i = 2 to
    m: (m + 1)/2 - 1/m times all of them.
    """
    times = (microbatches + 1) / 2 - 1 / microbatches
    return _MERGED * times * rows / RATE / microbatches


def join_seconds(tables: int) -> float:
    """Return the seconds per microbatch of the calls that join rows of ``tables`` tables."""
    return _JOINED * tables * CALL


def compute_update_bytes(weight: Weight, share: float = 1.0) -> float:
    """Return the bytes that the optimizer reads and writes of a parameter with a gradient.

    For a table with a sparse gradient: the bytes of the rows that ``share`` of a batch looks up,
    each once. Of N rows, n random lookups reach N (1 - exp(-n / N)) different ones.
    """
    whole = 2 * weight.weight + 2 * weight.optimizer
    if not weight.sparse:
        return whole + weight.gradient
    part = -math.expm1(-share * weight.rows / max(1, weight.weight))
    return part * (whole + weight.weight)
