"""What a calibrated cost model knows beside ops: updates, sums of gradients, the runtime itself.

Each is counted in bytes and calls first, at one rate for every device; stages measured whole say
how many times longer it takes there. A model without calibration goes by the device's bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fxpart.pricing.weights import step_seconds, updated
from fxpart.solver.problem import SPARSE_COPIES

if TYPE_CHECKING:
    from fxpart.cluster import Device
    from fxpart.profile import Calibration, Setting
    from fxpart.solver.problem import Weight

RATE = 15e9  # bytes/s, and
CALL = 3e-6  # seconds: of memory and of one tensor, before any factor
# Classes of work beside ops, as calibrations name them: per microbatch, and per step.
FRESH, ADDED = "fresh backward", "accumulate backward"
UPDATE, TENSORS = "bytes optimizer", "tensors optimizer"
ROWS, TABLES = "rows optimizer", "tables optimizer"  # of tables with sparse gradients
# Rows that came in any order are sorted and summed, by some twenty small calls for each table,
# after those of one microbatch were merged with those before it (read, read, written). A dense
# tensor is updated by some eight calls (AdamW has those).
_SORTED, _MERGED, _CALLS, _DENSE_CALLS = 8, 3, 20, 8


@runtime_checkable
class Calibrated(Protocol):
    """A cost model that was fitted to stages measured whole."""

    def setting_of(self, device: Device) -> Setting:
        """Where the device was measured."""

    def calibration_of(self, setting: Setting) -> Calibration:
        """What stages said there."""

    def full(self, device: Device) -> float:
        """How many times longer everything takes while all ranks of the host compute."""


def gradient_parts(weights: Sequence[Weight], later: bool) -> dict[str, float]:
    """Seconds of a microbatch's gradients, by class, before factors.

    later: they are added to those of an earlier microbatch (read, read, written). Sparse gradients
    cost nothing here: each microbatch's are kept as they are, and put together once a step.
    """
    dense = sum(weight.gradient for weight in weights if not weight.sparse)
    return {ADDED: 3 * dense / RATE} if later else {FRESH: dense / RATE}


def update_parts(weights: Sequence[Weight], share: float = 1.0) -> dict[str, float]:
    """Seconds of the optimizer's step, by class, before factors.

    Weight, gradient and state are read, weight and state written; of a table with a sparse gradient
    the rows that a step asks for, of two microbatches. share: of a batch's rows the part that the
    step has.
    """
    held = [w for w in weights if w.gradient]
    tables = [w for w in held if w.sparse]
    moved = sum(updated(w) * (share if w.sparse else 1.0) for w in held)
    found = {UPDATE: moved / RATE, TENSORS: _DENSE_CALLS * (len(held) - len(tables)) * CALL}
    if tables:
        rows = share * sum(w.gradient for w in tables)
        passes = _SORTED + _MERGED / SPARSE_COPIES
        found |= {ROWS: passes * rows / RATE, TABLES: _CALLS * len(tables) * CALL}
    return found


@dataclass(frozen=True)
class Own:
    """Seconds beside ops on one device while all ranks of its host compute.

    factors: by class; empty where the model has none. full: see :meth:`Calibrated.full`. action:
    for each forward and backward of a microbatch; step: once a step.
    """

    device: Device
    factors: Mapping[str, float] = field(default_factory=dict)
    full: float = 1.0
    action: float = 0.0
    step: float = 0.0

    @classmethod
    def of(cls, model: object, device: Device) -> Own:
        """What the model knows of the device."""
        if not isinstance(model, Calibrated):
            return cls(device)
        found = model.calibration_of(model.setting_of(device))
        full = model.full(device)
        return cls(device, found.factors, full, full * found.action, full * found.step)

    def updates(self, weights: Sequence[Weight], blocks: int) -> tuple[float, ...]:
        """The optimizer's seconds by block; a tied weight counts for its first."""
        if UPDATE not in self.factors:
            return step_seconds(tuple(weights), blocks, self.device)
        seconds = [0.0] * blocks
        for weight in weights:
            seconds[weight.blocks[0]] += self._taken(update_parts([weight]))
        return tuple(seconds)

    def of_rows(self, weights: Sequence[Weight], share: float) -> float:
        """How many times longer an update takes than one with a part of a batch's rows.

        1 where no gradient is sparse: dense ones do not depend on rows.
        """
        if not any(weight.sparse and weight.gradient for weight in weights):
            return 1.0
        return self._taken(update_parts(weights)) / self._taken(update_parts(weights, share))

    def merging(self, weights: Sequence[Weight], microbatches: int) -> float:
        """Seconds that more than two microbatches add to an update of tables, by microbatch.

        The rows of the i-th are merged with those of i - 1: i/m of a batch's, i = 2 to m. Those of
        two are part of :func:`update_parts`.
        """
        passes = max(0.0, (microbatches + 1) / 2 - 1 / microbatches - 1) / microbatches
        rows = sum(weight.rows for weight in weights)
        if ROWS not in self.factors:
            return passes * rows * self.gradient(later=True)
        return passes * self._taken({ROWS: _MERGED * rows / RATE})

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
