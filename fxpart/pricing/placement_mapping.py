"""What a placement problem made of a graph means: the solver's numbers back as placements."""

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
    """What a parameter costs beside its use, for each byte of it.

    memory: bytes held, itself included. step: bytes moved by the optimizer, and launches. gradient:
    whether it is trained.
    """

    memory: float
    moved: float
    launches: float
    gradient: bool


@dataclass
class SolverNode:
    """Where a graph node stands in the problem: at the solver's node ``root``.

    map: the node's own option for each of that node's strategies, None for the same number.
    number: of the map, equal for equal maps.
    """

    root: int
    options: Sequence[OpOption] | Sequence[Port]
    map: Map | None = None
    number: int = 0

    def at(self, strategy: int) -> int:
        """The node's own option where the solver's node has ``strategy``."""
        return strategy if self.map is None else int(self.map[strategy])


@dataclass
class PlacementMapping:
    """The problem and what its nodes mean."""

    problem: PlacementProblem
    mesh: Mesh
    ops: dict[fx.Node, SolverNode]
    sources: dict[fx.Node, SolverNode]
    unruled: tuple[str, ...]
    symbols: dict[fx.Node, dict[str, frozenset[str]]]

    def settled(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice with every open input cut along each axis that cuts its rows somewhere.

        An op may cut a dim whose size is only known at run time. The runtime sees to it that such a
        size can be cut if the input that it is read from is cut so; inputs are small, and what
        needs them whole gathers them. The first dim of an input that fits is cut.
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
        """The placement of an input on an axis that cuts these symbols."""
        if placement != REPLICATE:
            return placement
        return next(
            (Shard(dim) for dim, s in enumerate(node.meta["val"].shape) if str(s) in cut),
            placement,
        )

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategy of every op, by node name."""
        found = {}
        for node, placed in self.ops.items():
            option = placed.options[placed.at(choice[placed.root])]
            assert isinstance(option, OpOption), "ops have options"
            found[node.name] = option.strategy
        return found

    def placements(self, choice: Sequence[int]) -> dict[str, Placements]:
        """The placements of every input and of all state, by node name."""
        found = {}
        for node, placed in self.sources.items():
            port = placed.options[choice[placed.root]]
            assert not isinstance(port, OpOption), "sources have ports"
            found[node.name] = port[0]
        return found


def _placements(option: object) -> object:
    """Those of a source's port."""
    return option[0] if isinstance(option, tuple) else None
