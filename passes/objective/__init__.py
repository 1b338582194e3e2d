"""The objective of a batch that is divided into microbatches.

``analyze`` determines how each value of a microbatch relates to that of the whole batch: rows, sums
over the batch, means over its rows, or values that couple rows of several microbatches. ``divide``
rewrites the graph so that the microbatch losses, weighted by their rows, add up to the loss of the
whole batch. Values that depend only on inputs are computed once for the whole batch and become
inputs of the graph.
"""

from __future__ import annotations

from .analysis import LARGER_KEY, NUMBERS_KEY, ObjectiveAnalysis, analyze
from .batch_weight import WEIGHT_KEY, weight_of
from .microbatch_rewrite import ADDED_KEY, OBJECTIVE_KEY, MicrobatchRewrite, divide
from .row_dependence import STEP_STATE_KEY, RowDependence, coupling_of
from .row_repetition import REPEAT_KEY, repetition_of
from .total_inputs import TotalInputs

__all__ = [
    "ADDED_KEY",
    "LARGER_KEY",
    "NUMBERS_KEY",
    "OBJECTIVE_KEY",
    "REPEAT_KEY",
    "STEP_STATE_KEY",
    "WEIGHT_KEY",
    "MicrobatchRewrite",
    "ObjectiveAnalysis",
    "RowDependence",
    "TotalInputs",
    "analyze",
    "coupling_of",
    "divide",
    "repetition_of",
    "weight_of",
]
