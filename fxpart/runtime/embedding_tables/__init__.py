"""Sparse gradients of embedding tables: only touched rows are communicated."""

from __future__ import annotations

from fxpart.runtime.embedding_tables.sparse_gradient_parts import (
    SparseGradientParts,
    get_gradient_values,
    make_sparse_target,
)
from fxpart.runtime.embedding_tables.sparse_gradients import (
    SparseGradients,
    check_optimizer_support,
)

__all__ = [
    "SparseGradientParts",
    "SparseGradients",
    "check_optimizer_support",
    "get_gradient_values",
    "make_sparse_target",
]
