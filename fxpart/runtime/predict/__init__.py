"""Weights some updates ahead: what an asynchronous pipeline computes with in place of stale ones.

One rule a file; :func:`predictor` makes one for an optimizer. Beside them what PipeMare does
instead (:class:`Correction`, :func:`discounted_lr`), and an optimizer that expects late gradients
(:class:`SpikeCompensatedSGD`). See docs/prediction.md.
"""

from __future__ import annotations

from fxpart.runtime.predict.correction import Correction, discounted_lr
from fxpart.runtime.predict.predictor import Predictor
from fxpart.runtime.predict.rules import RULES, predictor
from fxpart.runtime.predict.spike import SpikeCompensatedSGD

__all__ = [
    "RULES", "Correction", "Predictor", "SpikeCompensatedSGD", "discounted_lr", "predictor",
]  # fmt: skip
