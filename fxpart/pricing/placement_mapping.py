"""Map a solution of the placement problem back to placements of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.pricing.placement_edges import Port
from fxpart.pricing.placement_options import OpOption, Strategy
from fxpart.sharding import REPLICATE, Mesh, Placement, Placements, Shard
from fxpart.solver.placement.problem import PlacementProblem

Map = NDArray[np.int64]


@dataclass(frozen=True)
class StateCosts:
    """Costs of a parameter besides its use, per byte of it.

    memory: bytes resident, including itself. moved: bytes moved by the optimizer. launches: of the
    optimizer's kernels. gradient: whether it is trained.
    """

    memory: float
    moved: float
    launches: float
    gradient: bool


@dataclass
class SolverNode:
    """The node of the problem that represents a graph node: the solver's node ``root``.

    map: the graph node's option for each strategy of that node, None for the same number. number:
    of the map, equal for equal maps.
    """

    root: int
    options: Sequence[OpOption] | Sequence[Port]
    map: Map | None = None
    number: int = 0

    def at(self, strategy: int) -> int:
        """Return the graph node's option if the solver's node has ``strategy``."""
        return strategy if self.map is None else int(self.map[strategy])


@dataclass
class PlacementMapping:
    """The problem, and the graph nodes of its nodes."""

    problem: PlacementProblem
    mesh: Mesh
    ops: dict[fx.Node, SolverNode]
    sources: dict[fx.Node, SolverNode]
    unruled: tuple[str, ...]
    symbols: dict[fx.Node, dict[str, frozenset[str]]]

    def shard_inputs(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Shard every undecided input along each axis that shards its rows somewhere.

        An op may shard a dim whose size is only known at run time. The runtime ensures that such a
        size is divisible if the input that it is read from is sharded so; inputs are small, and ops
        that need them whole gather them. The first dim of an input that fits is sharded.
        """
        found = list(choice)
        cut: list[set[str]] = [set() for _ in self.mesh.axes]
        for node, placed in self.ops.items():
            option = placed.options[placed.at(choice[placed.root])]
            assert isinstance(option, OpOption), "ops have options"
            for axis, name in enumerate(option.strategy):
                cut[axis] |= self.symbols[node].get(name, frozenset())
        for node, placed in self.sources.items():
            if node.op != "placeholder":
                continue
            port = placed.options[choice[placed.root]]
            assert not isinstance(port, OpOption), "sources have ports"
            wanted = tuple(self._cut(node, p, cut[axis]) for axis, p in enumerate(port[0]))
            found[placed.root] = next(
                (i for i, p in enumerate(placed.options) if _placements(p) == wanted),
                choice[placed.root],
            )
        return tuple(found)

    def _cut(self, node: fx.Node, placement: Placement | None, cut: set[str]) -> Placement | None:
        """Return the placement of an input on an axis that shards these symbols."""
        if placement != REPLICATE:
            return placement
        return next(
            (Shard(dim) for dim, s in enumerate(node.meta["val"].shape) if str(s) in cut),
            placement,
        )

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """Return the strategy of every op, by node name."""
        found = {}
        for node, placed in self.ops.items():
            option = placed.options[placed.at(choice[placed.root])]
            assert isinstance(option, OpOption), "ops have options"
            found[node.name] = option.strategy
        return found

    def placements(self, choice: Sequence[int]) -> dict[str, Placements]:
        """Return the placements of every input and of all state, by node name."""
        found = {}
        for node, placed in self.sources.items():
            port = placed.options[choice[placed.root]]
            assert not isinstance(port, OpOption), "sources have ports"
            found[node.name] = port[0]
        return found


def _placements(option: object) -> object:
    """Return the placements of a source's port."""
    return option[0] if isinstance(option, tuple) else None
