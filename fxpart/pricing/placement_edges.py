"""What it costs to hand a tensor from one op's placements to another's, forward and backward.

A port is how a tensor is given or taken: its placements and those of its gradient. A giver's
gradient placements are what it asks for (Shard for Shard, Replicate for Partial and Replicate, or
Partial where a sum may wait); a taker's are what its backward leaves.
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

# A step of the lowering in the cost model's words; the others move nothing.
_WORDS = {
    "all_gather": ("shard(0)", "replicate"),
    "all_reduce": ("partial", "replicate"),
    "reduce_scatter": ("partial", "shard(0)"),
    "all_to_all": ("shard(0)", "shard(1)"),
}


def get_gradient_placements(placements: Placements) -> Placements:
    """The placements of the gradient that a value with these placements needs."""
    return tuple(REPLICATE if p == PARTIAL else p for p in placements)


class ReshardCosts:
    """Seconds of changes of placement on one mesh; every distinct one is asked for once.

    ring: the links around an axis, see :class:`fxpart.pricing.device_groups.Rings`. copying:
    seconds for each byte that a lane reads or writes to pack pieces or to put them together.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: CostModel,
        ring: Callable[[str], tuple[Link, ...]],
        copying: float = 0.0,
    ) -> None:
        """Nothing is priced before it is asked for."""
        self.mesh, self._model, self._copying = mesh, model, copying
        self._rings = [ring(name) for name in mesh.names]
        self._known: dict[tuple[Placements, Placements, float], float] = {}
        self._single: dict[tuple[int, str, str, float], float] = {}
        self._steps: dict[tuple[Placements, Placements], list[_ReshardStep]] = {}
        self._ports: dict[tuple[Port, ...], int] = {}
        self._listed: list[tuple[Port, ...]] = []
        self._matrices: dict[tuple[int, int, float, bool, bool], Matrix] = {}

    def seconds(self, source: Placements, target: Placements, size: float) -> float:
        """For a tensor of ``size`` bytes in all."""
        if source == target:
            return 0.0
        key = (source, target, size)
        if key not in self._known:
            self._known[key] = sum(
                self.single(way.axis, *way.words, size / way.parts)
                + way.copied * size / way.parts * self._copying
                for way in self._way(source, target)
            )
        return self._known[key]

    def single(self, axis: int, source: str, target: str, size: float) -> float:
        """On one axis; the words are the cost model's."""
        key = (axis, source, target, size)
        if key not in self._single:
            self._single[key] = self._model.reshard(source, target, size, self._rings[axis]).seconds
        return self._single[key]

    def _way(self, source: Placements, target: Placements) -> list[_ReshardStep]:
        """The steps are those of the lowering; cuts and zeros move nothing."""
        key = (source, target)
        if key not in self._steps:
            way = []
            for step in steps(_whole(source), _whole(target)):
                if step.kind in _WORDS:
                    others = zip(step.before, self.mesh.shape, strict=True)
                    cuts = [n if isinstance(p, Shard) else 1 for p, n in others]
                    parts = prod(cuts) // cuts[step.axis]
                    copied = _copied(step, self.mesh.shape[step.axis])
                    way.append(_ReshardStep(step.axis, _WORDS[step.kind], parts, copied))
            self._steps[key] = way
        return self._steps[key]

    def ports(self, ports: Sequence[Port]) -> int:
        """A number for a sequence of ports, equal for equal ones."""
        key = tuple(ports)
        if key not in self._ports:
            self._ports[key] = len(self._listed)
            self._listed.append(key)
        return self._ports[key]

    def words(self, source: Placements, target: Placements) -> list[tuple[str, str]]:
        """The collectives between two placements on a mesh of one axis, in the model's words."""
        return [way.words for way in self._way(source, target)]

    def matrix(
        self, givers: int, takers: int, size: float, gradient: bool, again: bool = False
    ) -> Matrix:
        """Seconds by giver's and taker's port, for a tensor of ``size`` bytes in all.

        again: where it is gathered alone, it is gathered a second time for the backward.
        """
        key = (givers, takers, size, gradient, again)
        if key not in self._matrices:
            rows, columns = self._listed[givers], self._listed[takers]
            places = [p for p, _ in rows], [p for p, _ in columns]
            values = self._table(*places, size)
            if again:
                values = values * (1 + self._gathers(*places))
            if gradient:
                back = self._table(
                    [g for _, g in columns], [g for _, g in rows], size, gradient=True
                )
                values = values + back.T
            self._matrices[key] = values
        return self._matrices[key]

    def _gathers(self, sources: Sequence[Placements], targets: Sequence[Placements]) -> Matrix:
        """1 where all that lies between is gathering."""
        gather = _WORDS["all_gather"]
        return np.array([
            [float(all(way.words == gather for way in self._way(a, b))) for b in targets]
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
        """Each distinct pair once. A gradient's piece is its part of a sum still to be made."""
        first, second = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        small = np.array([
            [self.seconds(a, reached(a, b) if gradient else b, size) for b in second]
            for a in first
        ])  # fmt: skip
        return small[np.ix_([first.index(a) for a in sources], [second.index(b) for b in targets])]


@dataclass(frozen=True)
class _ReshardStep:
    """A collective on one axis. parts: into how many the other axes cut the tensor meanwhile.

    copied: bytes read and written to pack and put together, for each of those of such a part.
    """

    axis: int
    words: tuple[str, str]
    parts: int
    copied: float


def _copied(step: ReshardStep, lanes: int) -> float:
    """As :mod:`fxpart.pricing.collective_traffic` counts; here a dim behind dims of 1 counts as any
    other.
    """
    cuts = [p for p in (step.before[step.axis], step.after) if isinstance(p, Shard)]
    times, parts = packs(step.kind, lanes, sum(p.dim > 0 or p.outer > 1 for p in cuts))
    return times / parts


def _whole(placements: Placements) -> tuple[Placement, ...]:
    assert None not in placements, "placements are open"
    return placements  # type: ignore[return-value]


def reached(source: Placements, target: Placements) -> Placements:
    """The target, where pieces with zeros around count as Partial."""
    return tuple(
        s if t == PARTIAL and isinstance(s, Shard) else t
        for s, t in zip(source, target, strict=True)
    )
