"""Sparse gradients of embedding tables: only touched rows are communicated."""

from __future__ import annotations

from fxpart.runtime.embedding_tables.gradient_values import get_gradient_values
from fxpart.runtime.embedding_tables.optimizer_support import check_optimizer_support
from fxpart.runtime.embedding_tables.sparse_gradient_parts import (
    SparseGradientParts,
    make_sparse_target,
)
from fxpart.runtime.embedding_tables.sparse_gradients import SparseGradients

__all__ = [
    "SparseGradientParts",
    "SparseGradients",
    "check_optimizer_support",
    "get_gradient_values",
    "make_sparse_target",
]
