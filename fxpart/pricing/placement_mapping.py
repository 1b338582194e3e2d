"""Map a solution of the placement problem back to placements of the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.pricing.placement_edges import Port
from fxpart.pricing.placement_options import OpOption, Strategy
from fxpart.sharding import REPLICATE, Mesh, Placement, Placements, Shard
from fxpart.solver.placement.problem import PlacementProblem

Map = NDArray[np.int64]
Rows = tuple[int, str]  # a mesh axis, and a symbol in the sizes of dims


@dataclass(frozen=True)
class StateCosts:
    """Costs of a parameter besides its use, per byte of it.

    accumulated, optimizer: bytes of its gradient and of the optimizer's state. moved: bytes moved
    by the optimizer. launches: of the optimizer's kernels. gradient: whether it is trained.
    """

    accumulated: float
    optimizer: float
    moved: float
    launches: float
    gradient: bool

    def resident(self, level: int = 0, parts: int = 1) -> float:
        """Return resident bytes, including itself, under a ZeRO level over ``parts`` ranks."""
        held = [(1.0, 3), (self.accumulated, 2), (self.optimizer, 1)]
        return sum(size / (parts if level >= least else 1) for size, least in held)


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
        for axis, symbol in self.list_sharded_rows(choice):
            cut[axis].add(symbol)
        for node, placed in self.sources.items():
            if node.op != "placeholder":
                continue
            wanted = self._cut_all(node, _placements(placed.options[choice[placed.root]]), cut)
            found[placed.root] = next(
                (i for i, p in enumerate(placed.options) if _placements(p) == wanted),
                choice[placed.root],
            )
        return tuple(found)

    def forbid(self, decided: Mapping[Rows, bool]) -> dict[int, list[int]] | None:
        """Return the strategies left of each node that loses some; None if a node loses all.

        decided: whether an axis shards the dims of a symbol. If not, no op may; if it does, inputs
        with such a dim are sharded along it.
        """
        lost: dict[int, set[int]] = {}
        for node, placed in self.ops.items():
            for strategy in range(len(placed.options if placed.map is None else placed.map)):
                option = placed.options[placed.at(strategy)]
                assert isinstance(option, OpOption), "ops have options"
                if any(
                    not decided.get((axis, symbol), True)
                    for axis, name in enumerate(option.strategy)
                    for symbol in self.symbols[node].get(name, ())
                ):
                    lost.setdefault(placed.root, set()).add(strategy)
        cut = [{s for (at, s), wanted in decided.items() if wanted and at == axis}
               for axis in range(len(self.mesh.axes))]  # fmt: skip
        for node, placed in self.sources.items():
            if node.op == "placeholder":
                ports = [_placements(option) for option in placed.options]
                for strategy, port in enumerate(ports):
                    if port != (wanted := self._cut_all(node, port, cut)) and wanted in ports:
                        lost.setdefault(placed.root, set()).add(strategy)
        counts = [len(self.problem.kinds[kind].seconds) for kind in self.problem.nodes]
        left = {v: [i for i in range(counts[v]) if i not in gone] for v, gone in lost.items()}
        return left if all(left.values()) else None

    def list_sharded_rows(self, choice: Sequence[int]) -> Iterator[Rows]:
        """Yield axis and symbol of every dim with such a size that the choice shards somewhere."""
        for node, placed in self.ops.items():
            option = placed.options[placed.at(choice[placed.root])]
            assert isinstance(option, OpOption), "ops have options"
            for axis, name in enumerate(option.strategy):
                for symbol in sorted(self.symbols[node].get(name, ())):
                    yield axis, symbol

    def _cut_all(
        self, node: fx.Node, placements: Placements, cut: Sequence[Set[str]]
    ) -> Placements:
        """Return an input's placements with each replicated axis sharded by the axis's symbols."""
        return tuple(self._cut(node, p, cut[axis]) for axis, p in enumerate(placements))

    def _cut(self, node: fx.Node, placement: Placement | None, cut: Set[str]) -> Placement | None:
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
            found[node.name] = _placements(placed.options[choice[placed.root]])
        return found


def _placements(option: object) -> Placements:
    """Return the placements of a source's port."""
    assert isinstance(option, tuple), "sources have ports"
    placements: Placements = option[0]
    return placements
