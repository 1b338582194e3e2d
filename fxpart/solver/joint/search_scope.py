"""Parts of the search space, and their tables once they are opened."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints
from fxpart.solver.joint.device_count_dp import DeviceCountProgram
from fxpart.solver.joint.dp import SearchBranch
from fxpart.solver.joint.multipliers import LagrangeMultipliers

_LOOKS = 12  # searches for plans while spans of one scope are halved


@dataclass(frozen=True)
class SearchScope:
    """Plans of one microbatch count, schedule, set of options, and range of stages."""

    microbatches: int
    schedule: str
    options: Ints
    low: int
    high: int


class ScopeTables:
    """A scope with its tables."""

    def __init__(
        self,
        scope: SearchScope,
        branch: SearchBranch,
        prices: LagrangeMultipliers,
        counted: DeviceCountProgram,
        best: float,
    ) -> None:
        """prices, counted: the two methods to bound its fillings. best: limit for its entries."""
        self.scope, self.looks = scope, _LOOKS
        self.equip(branch, prices, counted, best)

    def equip(
        self,
        branch: SearchBranch,
        prices: LagrangeMultipliers,
        counted: DeviceCountProgram,
        best: float,
    ) -> None:
        """Replace the tables."""
        self.branch, self.prices, self.counted, self.best = branch, prices, counted, best
        self.loads: Floats = np.unique(branch.entries.load)

    def first(self, low: float) -> float:
        """Return the smallest load from ``low``."""
        place = int(np.searchsorted(self.loads, low, side="left"))
        return float(self.loads[place]) if place < len(self.loads) else inf

    def after(self, low: float) -> float:
        """Return the smallest load above ``low``."""
        return self.first(float(np.nextafter(low, inf)))

    def last(self, high: float) -> float:
        """Return the greatest load up to ``high``."""
        place = int(np.searchsorted(self.loads, high, side="right")) - 1
        return float(self.loads[place]) if place >= 0 else -inf
