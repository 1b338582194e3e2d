"""The weights that each forward and backward of an asynchronous stage reads."""

from fxpart.runtime.weights.counters import Counters, Used
from fxpart.runtime.weights.held import Source
from fxpart.runtime.weights.stage import StageWeights

__all__ = ["Counters", "Source", "StageWeights", "Used"]
