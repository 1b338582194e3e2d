"""Weight versions read by the forwards and backwards of an asynchronous stage."""

from fxpart.runtime.weights.counters import MicrobatchWeightUse, StageCounters
from fxpart.runtime.weights.stage_weights import StageWeights
from fxpart.runtime.weights.weight_stash import WeightSource

__all__ = ["MicrobatchWeightUse", "StageCounters", "StageWeights", "WeightSource"]
