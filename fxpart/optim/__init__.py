"""Optimizers that tolerate late gradients, for asynchronous pipelines.

:class:`Muon` and :class:`BasisRotation` step matrices as wholes, and parameters of other shapes by
AdamW, so that one optimizer serves a whole model.
"""

from __future__ import annotations

from fxpart.optim.basis_rotation import BasisRotation
from fxpart.optim.matrix_optimizer import MatrixOptimizer
from fxpart.optim.muon import Muon

__all__ = ["BasisRotation", "MatrixOptimizer", "Muon"]
