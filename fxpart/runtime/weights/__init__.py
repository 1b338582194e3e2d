"""The weights that each forward and backward of an asynchronous stage reads."""

from fxpart.runtime.weights.counters import MicrobatchWeightUse, StageCounters
from fxpart.runtime.weights.stage_weights import StageWeights
from fxpart.runtime.weights.weight_stash import WeightSource

__all__ = ["MicrobatchWeightUse", "StageCounters", "StageWeights", "WeightSource"]
