"""Parts of the search space: what they cover, and their tables once they are opened."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints
from fxpart.solver.joint.device_count_dp import DeviceCountProgram
from fxpart.solver.joint.dp import SearchBranch
from fxpart.solver.joint.multipliers import LagrangeMultipliers

_LOOKS = 12  # times that plans are looked for while spans of one scope are halved


@dataclass(frozen=True)
class SearchScope:
    """Plans of one count of microbatches, schedule, set of options, and range of stages."""

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
        """prices, counted: the two ways to bound its fillings. best: what its entries may reach."""
        self.scope, self.looks = scope, _LOOKS
        self.equip(branch, prices, counted, best)

    def equip(
        self,
        branch: SearchBranch,
        prices: LagrangeMultipliers,
        counted: DeviceCountProgram,
        best: float,
    ) -> None:
        """Take these tables from now on."""
        self.branch, self.prices, self.counted, self.best = branch, prices, counted, best
        self.loads: Floats = np.unique(branch.entries.load)

    def first(self, low: float) -> float:
        """The least load from ``low``."""
        place = int(np.searchsorted(self.loads, low, side="left"))
        return float(self.loads[place]) if place < len(self.loads) else inf

    def after(self, low: float) -> float:
        """The least load above ``low``."""
        return self.first(float(np.nextafter(low, inf)))

    def last(self, high: float) -> float:
        """The greatest load up to ``high``."""
        place = int(np.searchsorted(self.loads, high, side="right")) - 1
        return float(self.loads[place]) if place >= 0 else -inf
