"""The objective of a batch that is divided into microbatches.

``analyze`` finds what a graph's values become when a step runs microbatch by microbatch: rows, sums
over the batch, means over its rows, or values that couple rows of several microbatches. ``divide``
rewrites the graph so that the microbatches' losses, weighted by their rows, add up to the loss of
the whole batch: what depends on inputs alone is computed once for the whole batch and becomes an
input of the graph.
"""

from __future__ import annotations

from .analysis import LARGER_KEY, NUMBERS_KEY, Analysis, analyze
from .coupling import Coupling, coupling_of
from .divide import ADDED_KEY, OBJECTIVE_KEY, Divided, divide
from .repetition import REPEAT_KEY, repetition_of
from .totals import Totals
from .weight import WEIGHT_KEY, weight_of

__all__ = [
    "ADDED_KEY",
    "LARGER_KEY",
    "NUMBERS_KEY",
    "OBJECTIVE_KEY",
    "REPEAT_KEY",
    "WEIGHT_KEY",
    "Analysis",
    "Coupling",
    "Divided",
    "Totals",
    "analyze",
    "coupling_of",
    "divide",
    "repetition_of",
    "weight_of",
]
