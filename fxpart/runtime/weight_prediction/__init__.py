"""Weight prediction: weights some updates ahead, for asynchronous pipelines instead of stale ones.

One rule per file; :func:`make_predictor` makes one for an optimizer. Also PipeMare's alternative
(:class:`PipeMareCorrection`, :func:`discounted_lr`), feedback of the error of late updates
(:class:`ErrorFeedback`), and an optimizer for delayed gradients (:class:`SpikeCompensatedSGD`). See
docs/asynchronous_training.md.
"""

from __future__ import annotations

from fxpart.runtime.weight_prediction.error_feedback import ErrorFeedback
from fxpart.runtime.weight_prediction.pipemare import PipeMareCorrection, discounted_lr
from fxpart.runtime.weight_prediction.predictor import Predictor
from fxpart.runtime.weight_prediction.rules import RULES, make_predictor
from fxpart.runtime.weight_prediction.spike_compensation import SpikeCompensatedSGD

__all__ = [
    "RULES", "ErrorFeedback", "PipeMareCorrection", "Predictor", "SpikeCompensatedSGD",
    "discounted_lr", "make_predictor",
]  # fmt: skip
