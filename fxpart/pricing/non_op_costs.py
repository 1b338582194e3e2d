"""What a calibrated cost model knows beside ops: updates, sums of gradients, the runtime itself.

Each is counted in bytes and calls first, at one rate for every device; stages measured whole say
how many times longer it takes there. A model without calibration goes by the device's bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fxpart.pricing.optimizer_step import (
    RATE,
    ROWS,
    TABLES,
    UPDATE,
    join_seconds,
    merge_seconds,
    update_parts,
)
from fxpart.pricing.weights import step_seconds

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device
    from fxpart.costs import CostModel
    from fxpart.solver.problem import Weight

# Classes of work beside ops, as calibrations name them, of a microbatch's gradients.
FRESH, ADDED = "fresh backward", "accumulate backward"


def gradient_parts(weights: Sequence[Weight], later: bool) -> dict[str, float]:
    """Seconds of a microbatch's gradients, by class, before factors.

    later: they are added to those of an earlier microbatch (read, read, written). Sparse gradients
    cost nothing here: each microbatch's are kept as they are, and put together once a step.
    """
    dense = sum(weight.gradient for weight in weights if not weight.sparse)
    return {ADDED: 3 * dense / RATE} if later else {FRESH: dense / RATE}


@dataclass(frozen=True)
class NonOpCosts:
    """Seconds beside ops on one device while all ranks of its host compute.

    factors: by class; empty where the model has none. full: how many times longer everything takes
    while all ranks of the host compute.
    action: for each forward and backward of a microbatch; step: once a step.
    """

    device: Device
    factors: Mapping[str, float] = field(default_factory=dict)
    full: float = 1.0
    action: float = 0.0
    step: float = 0.0

    @classmethod
    def of(cls, model: CostModel, device: Device) -> NonOpCosts:
        """Return the costs beside ops that the model knows for the device."""
        known = model.knowledge(device)
        full = known.slowdown
        return cls(device, known.factors, full, full * known.action, full * known.step)

    def updates(self, weights: Sequence[Weight], blocks: int) -> tuple[float, ...]:
        """The optimizer's seconds by block; a tied weight counts for its first."""
        if UPDATE not in self.factors:
            return step_seconds(tuple(weights), blocks, self.device)
        seconds = [0.0] * blocks
        for weight in weights:
            seconds[weight.blocks[0]] += self._taken(update_parts([weight]))
        return tuple(seconds)

    def of_timed(self, weights: Sequence[Weight], share: float, microbatches: int) -> float:
        """How many times longer an update takes than one that was timed, without what merges take.

        That had ``share`` of a batch's rows in so many microbatches. 1 where no gradient is sparse:
        dense ones do not depend on rows.
        """
        if not any(weight.sparse and weight.gradient for weight in weights):
            return 1.0
        timed = self._taken(update_parts(weights, share, microbatches))
        return self._taken(update_parts(weights)) / timed

    def merging(self, weights: Sequence[Weight], microbatches: int) -> float:
        """Seconds for each microbatch that putting rows of tables together adds to an update.

        That is once a step: bytes, and for each table the calls that each microbatch takes.
        """
        tables = [weight for weight in weights if weight.sparse and weight.gradient]
        seconds = merge_seconds(sum(weight.rows for weight in tables), microbatches)
        if ROWS not in self.factors:
            return seconds * RATE / self.device.bandwidth
        return self._taken({ROWS: seconds, TABLES: join_seconds(len(tables))})

    @property
    def copying(self) -> float:
        """Seconds per byte that is read or written by a copy."""
        if UPDATE not in self.factors:
            return 1 / self.device.bandwidth
        return self._taken({UPDATE: 1 / RATE})

    def gradient(self, later: bool) -> float:
        """Seconds of a backward for each byte of a gradient that it makes; later: that it adds."""
        if ADDED not in self.factors:
            return 3 / self.device.bandwidth if later else 0.0
        return self._taken({ADDED: 3 / RATE} if later else {FRESH: 1 / RATE})

    def sums(
        self, weights: Sequence[Weight], blocks: int, microbatches: int
    ) -> NDArray[np.float64]:
        """Seconds of a microbatch's backward, by block, that gradients take beside the ops.

        On average over a step's microbatches: the first makes them, the others add to them.
        """
        seconds = np.zeros(blocks)
        for weight in weights:
            for block in weight.blocks:
                seconds[block] += self._sum(weight, microbatches)
        return seconds

    def _sum(self, weight: Weight, microbatches: int) -> float:
        later, share = microbatches > 1, (microbatches - 1) / microbatches
        if weight.sparse:
            return self.merging([weight], microbatches)
        if ADDED not in self.factors:
            return weight.gradient * self.gradient(later)
        each = share * self.gradient(later=True) + (1 - share) * self.gradient(later=False)
        return weight.gradient * each

    def _taken(self, parts: Mapping[str, float]) -> float:
        return self.full * sum(
            seconds * self.factors.get(name, 1.0) for name, seconds in parts.items()
        )
