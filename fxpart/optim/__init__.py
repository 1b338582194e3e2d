"""Optimizers for asynchronous pipelines, which tolerate late gradients, and for embedding tables.

:class:`Muon` and :class:`BasisRotation` step matrices as wholes, and parameters of other shapes by
AdamW, so that one optimizer serves a whole model. :class:`RowWiseAdagrad` is for tables,
whose rows :class:`ManagedIds` gives to ids.
"""

from __future__ import annotations

from fxpart.optim.basis_rotation import BasisRotation
from fxpart.optim.managed_ids import ManagedIds, RowAssignment
from fxpart.optim.matrix_optimizer import MatrixOptimizer
from fxpart.optim.muon import Muon
from fxpart.optim.row_wise_adagrad import RowWiseAdagrad

__all__ = [
    "BasisRotation",
    "ManagedIds",
    "MatrixOptimizer",
    "Muon",
    "RowAssignment",
    "RowWiseAdagrad",
]
