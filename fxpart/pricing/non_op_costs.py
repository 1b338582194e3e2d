"""Calibrated costs besides ops: optimizer step, gradient accumulation, runtime overhead.

Each is counted in bytes and calls, at one rate for every device; measurements of whole stages
provide the factor of a class. Without calibration the bandwidth is used that the device reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fxpart import costmodels
from fxpart.costmodels.efficiency import copy_bandwidth
from fxpart.pricing.device_groups import group_devices
from fxpart.pricing.device_limits import group_by_kind
from fxpart.pricing.host_offload import update_seconds
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
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel
    from fxpart.solver.problem import Weight

# Classes of work on a microbatch's gradients, as named by calibrations.
FRESH, ADDED = "fresh backward", "accumulate backward"


def gradient_parts(weights: Sequence[Weight], later: bool) -> dict[str, float]:
    """Return the seconds of a microbatch's gradients, by class, before factors.

    later: they are added to those of an earlier microbatch (two reads, one write). Sparse gradients
    cost nothing here: those of each microbatch are kept and merged per step.
    """
    dense = sum(weight.gradient for weight in weights if not weight.sparse)
    return {ADDED: 3 * dense / RATE} if later else {FRESH: dense / RATE}


@dataclass(frozen=True)
class NonOpCosts:
    """Seconds besides ops on one device while all ranks of its host compute.

    factors: by class; empty where the model has none. full: factor on all times while all ranks of
    the host compute. action: seconds for each forward and backward of a microbatch; step: seconds
    per step.
    """

    device: Device
    factors: Mapping[str, float] = field(default_factory=dict)
    full: float = 1.0
    action: float = 0.0
    step: float = 0.0

    @classmethod
    def of(cls, model: CostModel, device: Device) -> NonOpCosts:
        """Return the costs besides ops that the model has for the device."""
        known = model.knowledge(device)
        full = known.slowdown
        return cls(device, known.factors, full, full * known.action, full * known.step)

    def updates(self, weights: Sequence[Weight], blocks: int) -> tuple[float, ...]:
        """Return the optimizer's seconds by block; a tied weight counts for its first.

        An update of an offloaded weight on the host is not calibrated.
        """
        here = tuple(weight for weight in weights if not weight.host)
        seconds = [0.0] * blocks
        if UPDATE not in self.factors:
            seconds = list(step_seconds(here, blocks, self.device))
            here = ()
        for weight in here:
            seconds[weight.blocks[0]] += self._seconds_of(update_parts([weight]))
        for weight in weights:
            if weight.host:
                seconds[weight.blocks[0]] += update_seconds(weight, self.device)
        return tuple(seconds)

    def of_timed(self, weights: Sequence[Weight], share: float, microbatches: int) -> float:
        """Return the time of an update over that of a measured one, without merging rows.

        The measured one had ``share`` of a batch's rows in ``microbatches``. 1 where no gradient is
        sparse: dense updates do not depend on rows.
        """
        if not any(weight.sparse and weight.gradient for weight in weights):
            return 1.0
        timed = self._seconds_of(update_parts(weights, share, microbatches))
        return self._seconds_of(update_parts(weights)) / timed

    def merging(self, weights: Sequence[Weight], microbatches: int) -> float:
        """Return the seconds per microbatch that merging table rows adds to an update.

        Merging happens per step: bytes, and for each embedding table the calls of each microbatch.
        """
        tables = [weight for weight in weights if weight.sparse and weight.gradient]
        seconds = merge_seconds(sum(weight.rows for weight in tables), microbatches)
        if ROWS not in self.factors:
            return seconds * RATE / copy_bandwidth(self.device)
        return self._seconds_of({ROWS: seconds, TABLES: join_seconds(len(tables))})

    @property
    def copying(self) -> float:
        """Return the seconds per byte that a copy reads or writes."""
        if UPDATE not in self.factors:
            return 1 / copy_bandwidth(self.device)
        return self._seconds_of({UPDATE: 1 / RATE})

    def gradient(self, later: bool) -> float:
        """Return the seconds of a backward per byte of a gradient. later: it is accumulated."""
        if ADDED not in self.factors:
            return 3 / copy_bandwidth(self.device) if later else 0.0
        return self._seconds_of({ADDED: 3 / RATE} if later else {FRESH: 1 / RATE})

    def accumulation(
        self, weights: Sequence[Weight], blocks: int, microbatches: int
    ) -> NDArray[np.float64]:
        """Return by block the seconds of a microbatch's backward for gradients besides the ops.

        Averaged over a step's microbatches: the first writes gradients, the others accumulate.
        """
        seconds = np.zeros(blocks)
        for weight in weights:
            for block in weight.blocks:
                seconds[block] += self._accumulate(weight, microbatches)
        return seconds

    def _accumulate(self, weight: Weight, microbatches: int) -> float:
        later, share = microbatches > 1, (microbatches - 1) / microbatches
        if weight.sparse:
            return self.merging([weight], microbatches)
        if ADDED not in self.factors:
            return weight.gradient * self.gradient(later)
        each = share * self.gradient(later=True) + (1 - share) * self.gradient(later=False)
        return weight.gradient * each

    def _seconds_of(self, parts: Mapping[str, float]) -> float:
        return self.full * sum(
            seconds * self.factors.get(name, 1.0) for name, seconds in parts.items()
        )


def copying_of(
    cluster: Cluster, cost_model: str | CostModel, group_size: int = 1
) -> tuple[float, ...]:
    """Return the seconds to read or write a byte, by the problem's device types."""
    model = costmodels.find(cost_model, cluster) if isinstance(cost_model, str) else cost_model
    devices, _ = group_by_kind(group_devices(cluster, group_size))
    return tuple(NonOpCosts.of(model, device).copying for device in devices)
