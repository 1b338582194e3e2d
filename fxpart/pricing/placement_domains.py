"""The possible ports of a parameter, an input or a shared conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import fx

from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.pricing.placement_edges import Port
from fxpart.pricing.placement_graph import GraphDataflow, TensorValue
from fxpart.pricing.placement_options import OpFamily
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placement, Placements, Shard

Side = tuple[Placement, Placement]  # a value and its gradient along one axis


@dataclass(frozen=True)
class PortDomains:
    """Ports made of the placements that ops return and require, by axis. families: of every op."""

    mesh: Mesh
    flow: GraphDataflow
    families: Mapping[fx.Node, OpFamily]
    specs: Specs
    sizes: Sizes
    _known: dict[tuple[Port, ...], tuple[Port, ...]] = field(default_factory=dict)

    def of_conversion(self, value: TensorValue, given: Sequence[Port]) -> tuple[Port, ...]:
        """Return the ports of a shared conversion: as returned, or as one user requires it."""
        takes = self._list_user_ports(value)
        columns = [
            dict.fromkeys(_side(port, axis) for port in (*given, *takes))
            for axis in range(len(self.mesh.axes))
        ]
        return self._product(value, columns)

    def of_source(
        self, value: TensorValue, fixed: Placements | None, *, trained: bool
    ) -> tuple[Port, ...]:
        """Return the ports of an input or state: replicated, or sharded.

        Sharded as a user requires, or evenly along any dim.

        fixed: the decided placements. trained: its gradient may be a partial sum until the end of
        the step.
        """
        takes = self._list_user_ports(value)
        columns = []
        for axis, parts in enumerate(self.mesh.shape):
            found: dict[Side, None] = {(REPLICATE, REPLICATE): None}
            if trained:
                found[REPLICATE, PARTIAL] = None
            sides = (_side(port, axis) for port in takes)
            found.update((side, None) for side in sides if isinstance(side[0], Shard))
            for dim, size in enumerate(self.shape(value)):
                if size >= parts and size % parts == 0:
                    found[Shard(dim), Shard(dim)] = None
            wanted = None if fixed is None else fixed[axis]
            if wanted is not None:
                back = REPLICATE if wanted == PARTIAL else wanted
                decided = {side: None for side in found if side[0] == wanted}
                found = decided or {(wanted, back): None}
            columns.append(found)
        return self._product(value, columns)

    def shape(self, value: TensorValue) -> tuple[int, ...]:
        """Return the shape of the unsharded value."""
        tensor = self.specs.tensors(value.node)[value.index]
        return tuple(self.sizes.number(d) for d in tensor.shape)

    def bytes(self, value: TensorValue) -> float:
        """Return the bytes of the unsharded value."""
        tensor = self.specs.tensors(value.node)[value.index]
        return float(self.sizes.number(tensor_bytes(tensor)))

    def _product(
        self, value: TensorValue, columns: Sequence[Mapping[Side, None]]
    ) -> tuple[Port, ...]:
        """Return all combinations that the value's dims allow; equal results are one object."""
        ports = tuple(
            (tuple(place for place, _ in each), tuple(back for _, back in each))
            for each in product(*columns)
        )
        found = tuple(port for port in ports if self._fits(value, port[0])) or ports
        return self._known.setdefault(found, found)

    def _list_user_ports(self, value: TensorValue) -> list[Port]:
        """Return every port that a user may require of the value."""
        found: dict[Port, None] = {}
        visited: set[tuple[int, int]] = set()
        for op, position in self.flow.users[value]:
            family = self.families[op]
            if (id(family), position) not in visited:
                visited.add((id(family), position))
                found.update(dict.fromkeys(o.takes[position] for o in family.options))
        return list(found)

    def _fits(self, value: TensorValue, placements: Placements) -> bool:
        """Return whether the sharded dims have as many equal parts as all axes require.

        A single axis may shard unevenly if every rank gets something.
        """
        shape = self.shape(value)
        cuts: dict[int, int] = {}
        for placement, parts in zip(placements, self.mesh.shape, strict=True):
            if isinstance(placement, Shard):
                outer = placement.outer if placement.dim not in cuts else 1
                outer = outer if isinstance(outer, int) else 1
                cuts[placement.dim] = cuts.get(placement.dim, 1) * parts * outer
        single = sum(isinstance(p, Shard) for p in placements) <= 1
        return all(shape[d] % n == 0 or (single and shape[d] >= n) for d, n in cuts.items())


def _side(port: Port, axis: int) -> Side:
    place, back = port[0][axis], port[1][axis]
    assert place is not None and back is not None, "ports have no undecided axis"
    return place, back
