"""Costs of changing a tensor from one op's placements to another's, forward and backward.

A port is how a tensor is returned or required: its placements and those of its gradient. The
gradient placements of a result are those that it requires (Shard for Shard, Replicate for Partial
and Replicate, or Partial where a reduction may be deferred); those of an operand are what its
backward returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fxpart.passes.lowering.reshard_steps import ReshardStep, steps
from fxpart.pricing.collective_traffic import packs
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Placements, Shard

if TYPE_CHECKING:
    from fxpart.cluster.devices import Link
    from fxpart.costs import CostModel

Port = tuple[Placements, Placements]  # of the value, of its gradient
Matrix = NDArray[np.float64]

# The steps of the lowering with communication, as named by the cost model.
_COLLECTIVES = {
    "all_gather": ("shard(0)", "replicate"),
    "all_reduce": ("partial", "replicate"),
    "reduce_scatter": ("partial", "shard(0)"),
    "all_to_all": ("shard(0)", "shard(1)"),
}


def get_gradient_placements(placements: Placements) -> Placements:
    """Return the gradient placements that a value with these placements requires."""
    return tuple(REPLICATE if p == PARTIAL else p for p in placements)


class ReshardCosts:
    """Seconds of changes of placement on one mesh; each distinct one is priced once.

    ring: returns the links around an axis, see :class:`fxpart.pricing.device_groups.Rings`.
    copying: seconds per byte that a rank reads or writes to pack or unpack pieces.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: CostModel,
        ring: Callable[[str], tuple[Link, ...]],
        copying: float = 0.0,
    ) -> None:
        """Create it; nothing is priced before it is needed."""
        self.mesh, self._model, self._copying = mesh, model, copying
        self._rings = [ring(name) for name in mesh.names]
        self._known: dict[tuple[Placements, Placements, float], float] = {}
        self._single: dict[tuple[int, str, str, float], float] = {}
        self._steps: dict[tuple[Placements, Placements], list[_ReshardStep]] = {}
        self._ports: dict[tuple[Port, ...], int] = {}
        self._listed: list[tuple[Port, ...]] = []
        self._matrices: dict[tuple[int, int, float, bool, bool], Matrix] = {}

    def seconds(self, source: Placements, target: Placements, size: float) -> float:
        """Return the seconds for a tensor of ``size`` bytes in all."""
        if source == target:
            return 0.0
        key = (source, target, size)
        if key not in self._known:
            self._known[key] = sum(
                self.single(step.axis, *step.collective, size / step.parts)
                + step.copied * size / step.parts * self._copying
                for step in self._list_steps(source, target)
            )
        return self._known[key]

    def single(self, axis: int, source: str, target: str, size: float) -> float:
        """Return the seconds on one axis; source and target as named by the cost model."""
        key = (axis, source, target, size)
        if key not in self._single:
            self._single[key] = self._model.reshard(source, target, size, self._rings[axis]).seconds
        return self._single[key]

    def _list_steps(self, source: Placements, target: Placements) -> list[_ReshardStep]:
        """Return the steps of the lowering that communicate; slicing and zeros do not."""
        key = (source, target)
        if key not in self._steps:
            found = []
            for step in steps(_whole(source), _whole(target)):
                if step.kind in _COLLECTIVES:
                    others = zip(step.before, self.mesh.shape, strict=True)
                    cuts = [n if isinstance(p, Shard) else 1 for p, n in others]
                    parts = prod(cuts) // cuts[step.axis]
                    copied = _copied(step, self.mesh.shape[step.axis])
                    found.append(_ReshardStep(step.axis, _COLLECTIVES[step.kind], parts, copied))
            self._steps[key] = found
        return self._steps[key]

    def ports(self, ports: Sequence[Port]) -> int:
        """Return a number for a sequence of ports, equal for equal ones."""
        key = tuple(ports)
        if key not in self._ports:
            self._ports[key] = len(self._listed)
            self._listed.append(key)
        return self._ports[key]

    def list_collectives(self, source: Placements, target: Placements) -> list[tuple[str, str]]:
        """Return the collectives between two placements on a mesh of one axis."""
        return [step.collective for step in self._list_steps(source, target)]

    def matrix(
        self, givers: int, takers: int, size: float, gradient: bool, regathered: bool = False
    ) -> Matrix:
        """Return the seconds by the ports of producer and user, for ``size`` bytes in all.

        again: where it is only gathered, it is gathered a second time for the backward.
        """
        key = (givers, takers, size, gradient, regathered)
        if key not in self._matrices:
            rows, columns = self._listed[givers], self._listed[takers]
            places = [p for p, _ in rows], [p for p, _ in columns]
            values = self._table(*places, size)
            if regathered:
                values = values * (1 + self._gathers(*places))
            if gradient:
                back = self._table(
                    [g for _, g in columns], [g for _, g in rows], size, gradient=True
                )
                values = values + back.T
            self._matrices[key] = values
        return self._matrices[key]

    def _gathers(self, sources: Sequence[Placements], targets: Sequence[Placements]) -> Matrix:
        """Return 1 where the change of placement consists of all-gathers only."""
        gather = _COLLECTIVES["all_gather"]
        return np.array([
            [
                float(all(step.collective == gather for step in self._list_steps(a, b)))
                for b in targets
            ]
            for a in sources
        ])  # fmt: skip

    def _table(
        self,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        size: float,
        *,
        gradient: bool = False,
    ) -> Matrix:
        """Return the seconds of all pairs; a gradient's shard may be a pending partial sum."""
        first, second = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        small = np.array([
            [self.seconds(a, resolve_partial(a, b) if gradient else b, size) for b in second]
            for a in first
        ])  # fmt: skip
        return small[np.ix_([first.index(a) for a in sources], [second.index(b) for b in targets])]


@dataclass(frozen=True)
class _ReshardStep:
    """A collective on one axis. parts: into how many parts the other axes shard the tensor.

    copied: bytes read and written by packing, per byte of such a part.
    """

    axis: int
    collective: tuple[str, str]
    parts: int
    copied: float


def _copied(step: ReshardStep, ranks: int) -> float:
    """Return copied bytes as in :mod:`fxpart.pricing.collective_traffic`.

    Dims after dims of size 1 are not treated as leading here.
    """
    cuts = [p for p in (step.before[step.axis], step.after) if isinstance(p, Shard)]
    times, parts = packs(step.kind, ranks, sum(p.dim > 0 or p.outer != 1 for p in cuts))
    return times / parts


def _whole(placements: Placements) -> tuple[Placement, ...]:
    assert None not in placements, "no axis is undecided"
    return placements  # type: ignore[return-value]


def resolve_partial(source: Placements, target: Placements) -> Placements:
    """Return the target; shards padded with zeros count as Partial."""
    return tuple(
        s if t == PARTIAL and isinstance(s, Shard) else t
        for s, t in zip(source, target, strict=True)
    )
