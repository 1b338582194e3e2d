"""Build the placement problem of a graph: nodes, strategies and edges, without duplicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.compat.optimizer_parts import ANY_PARTS, OptimizerParts
from fxpart.compiler.work_estimate import is_heavy
from fxpart.errors import error
from fxpart.passes.rules import operands
from fxpart.pricing.placement_domains import PortDomains
from fxpart.pricing.placement_edges import Matrix, Port, ReshardCosts
from fxpart.pricing.placement_graph import GraphDataflow, TensorValue, find_followed_operand
from fxpart.pricing.placement_live_tensors import find_memory_peaks
from fxpart.pricing.placement_mapping import Map, PlacementMapping, SolverNode, StateCosts
from fxpart.pricing.placement_options import OpFamilies, OpFamily, OpOption, Strategy
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import Sizes
from fxpart.sharding import PARTIAL, REPLICATE, Mesh, Placements, Shard
from fxpart.solver.placement.problem import NodeCosts, PlacementEdge, PlacementProblem


@dataclass
class _PlacementNodeCosts:
    name: str
    seconds: NDArray[np.float64]
    standing: NDArray[np.float64]


@dataclass
class PlacementProblemBuilder:
    """Builds one problem. state: costs by the name of the state. zero: ZeRO level, and its axes.

    divisible: how the optimizer allows to divide parameters.
    """

    mesh: Mesh
    flow: GraphDataflow
    families: OpFamilies
    reshards: ReshardCosts
    specs: Specs
    sizes: Sizes
    state: Mapping[str, StateCosts]
    microbatches: int
    bandwidth: float
    launch: float
    zero: tuple[int, tuple[int, ...]] = (0, ())
    divisible: OptimizerParts = ANY_PARTS
    only: Mapping[str, Strategy] = field(default_factory=dict)
    nodes: list[_PlacementNodeCosts] = field(default_factory=list)
    ops: dict[fx.Node, SolverNode] = field(default_factory=dict)
    sources: dict[fx.Node, SolverNode] = field(default_factory=dict)
    givers: dict[TensorValue, tuple[SolverNode, int]] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], list[tuple[int, Matrix]]] = field(default_factory=dict)
    _maps: dict[bytes, int] = field(default_factory=dict)
    _gathered: dict[object, Matrix] = field(default_factory=dict)
    _ports: dict[tuple[int, int, str], int] = field(default_factory=dict)
    _referenced_options: list[object] = field(default_factory=list)

    def build(self, budget: float) -> PlacementMapping:
        """Build every op in order, its parameters just before it."""
        self._users = {value: len(users) for value, users in self.flow.users.items()}
        families = {op: self._family(op) for op in self.flow.ops}
        self._refuse([op for op in self.flow.ops if not families[op].options])
        self._domains = PortDomains(self.mesh, self.flow, families, self.specs, self.sizes)
        for op in self.flow.ops:
            for operand in self._operands(op):
                if operand.node.op != "call_function" and operand not in self.givers:
                    self._source(operand)
            self._op(op, families[op])
        if self.flow.loss in self.givers:
            self._whole(self.flow.loss)
        return PlacementMapping(
            self._problem(budget), self.mesh, self.ops, self.sources, self._unruled(),
            {op: self.families.symbols(op) for op in self.flow.ops},
        )  # fmt: skip

    def _refuse(self, ops: Sequence[fx.Node]) -> None:
        """Raise FXP105 for ops whose annotations leave no feasible strategy."""
        if ops:
            raise error(
                "FXP105",
                where=f"{len(ops)} ops from {ops[0].name} on, mesh {self.mesh}",
                why="the sharded dim has fewer rows in a microbatch than the mesh has ranks",
                fix="use fewer microbatches, a larger batch or another mesh",
            )

    def _unruled(self) -> tuple[str, ...]:
        return tuple(op.name for op in self.flow.ops if self.families.rule(op) is None)

    def _operands(self, op: fx.Node) -> list[TensorValue]:
        return [self.flow.value[o] for o in operands(op) if o in self.flow.value]

    def _family(self, op: fx.Node) -> OpFamily:
        only = self.only.get(op.name)
        if op in self.flow.shared and only is None:
            only = ("",) * len(self.mesh.axes)
        return self.families.of(
            op,
            self.flow.kept.get(op, ()),
            more=self.flow.parts.get(op, ()),
            only=only,
            waiting=op in self.flow.constant and annotation(op).requires_grad,
        )

    # -- nodes ---------------------------------------------------------------------------------

    def _add(self, name: str, seconds: Sequence[float], standing: Sequence[float]) -> int:
        self.nodes.append(
            _PlacementNodeCosts(name, np.array(seconds, float), np.array(standing, float))
        )
        return len(self.nodes) - 1

    def _op(self, op: fx.Node, family: OpFamily) -> None:
        leader = find_followed_operand(op, self.flow, self._users)
        placed = None if leader is None else self._follow(op, family, leader)
        if placed is None:
            root = self._add(op.name, family.seconds, family.standing)
            placed = SolverNode(root, family.options)
        self.ops[op] = placed
        for position, operand in enumerate(operands(op)):
            value = self.flow.value.get(operand)
            if value is not None and value in self.givers:
                self._edge(value, placed, position, self._flows(op, value), self._kept(op, value))
        for index in range(len(family.options[0].gives)):
            value = TensorValue(op, index)
            if value in self.flow.users:
                self.givers[value] = (placed, index)
                if len(self.flow.users[value]) > 1 and annotation(op).requires_grad:
                    self._convert(value)

    def _follow(self, op: fx.Node, family: OpFamily, position: int) -> SolverNode | None:
        """Merge the op into its leader's node: for each leader strategy its cheapest free one.

        Free: nothing is moved between them. None where some strategy of the leader has none.
        """
        value = self.flow.value[operands(op)[position]]
        giver, index = self.givers[value]
        between = self._matrix(value, giver, index, SolverNode(0, family.options), position,
                               self._flows(op, value))  # fmt: skip
        own = np.array(family.seconds)
        costs = np.where(between <= 0, own[None, :], np.inf)
        if not np.isfinite(costs.min(axis=1)).all():
            return None
        chosen = costs.argmin(axis=1).astype(np.int64)
        node = self.nodes[giver.root]
        node.seconds = node.seconds + own[chosen]
        node.standing = node.standing + np.array(family.standing)[chosen]
        return SolverNode(giver.root, family.options, chosen, self._number(chosen))

    def _number(self, chosen: Map) -> int:
        return self._maps.setdefault(chosen.tobytes(), len(self._maps) + 1)

    def _convert(self, value: TensorValue) -> None:
        """Add a node for the conversion that several users share: users start from its result."""
        giver, index = self.givers[value]
        ports = self._domains.of_conversion(value, self._given(giver, index))
        root = self._add(f"{value.node.name} shared", [0.0] * len(ports), [0.0] * len(ports))
        placed = SolverNode(root, ports)
        self._edge(value, placed, 0, flows=True)
        self.givers[value] = (placed, 0)

    def _source(self, value: TensorValue) -> None:
        """Add an input, a parameter or a buffer, with every placement that a user may need."""
        node = value.node
        decided = annotation(node).sharding
        fixed = decided.results[0] if decided is not None and decided.results else None
        state = self.state.get(str(node.target)) if node.op == "get_attr" else None
        trained = state is not None and state.gradient
        ports = self._domains.of_source(value, fixed, trained=trained)
        if trained and str(node.target) in self.divisible.whole:
            ports = tuple(port for port in ports if self._is_divisible(node, port[0], fixed))
        size = self._domains.bytes(value)
        standing, seconds = [], []
        for place, gradient in ports:
            local_bytes = size / self._parts(place)
            time, memory = 0.0, local_bytes
            if state is None:
                time = local_bytes / self.bandwidth * self.microbatches  # an input is read once
            else:
                memory = local_bytes * self._resident(state, place)
                time = local_bytes * state.moved / self.bandwidth + state.launches * self.launch
            if trained:
                waits = tuple(place[i] if g != PARTIAL else PARTIAL for i, g in enumerate(gradient))
                time += self.reshards.seconds(waits, place, size)
            seconds.append(time)
            standing.append(memory)
        placed = SolverNode(self._add(node.name, seconds, standing), ports)
        self.sources[node] = placed
        self.givers[value] = (placed, 0)

    def _is_divisible(self, node: fx.Node, place: Placements, fixed: Placements | None) -> bool:
        """Return whether the optimizer allows the placements that are not decided."""
        return all(
            self.divisible.may_shard(str(node.target), one.dim)
            for axis, one in enumerate(place)
            if isinstance(one, Shard) and (fixed is None or fixed[axis] is None)
        )

    def _resident(self, state: StateCosts, place: Placements) -> float:
        """Return bytes per byte of state: ZeRO shards what its axes do not shard already."""
        level, axes = self.zero
        parts = prod(self.mesh.shape[axis] for axis in axes if place[axis] == REPLICATE)
        return state.resident(level, parts) if state.gradient else state.resident()

    # -- edges ---------------------------------------------------------------------------------

    def _flows(self, op: fx.Node, value: TensorValue) -> bool:
        """Return whether a gradient flows from the op to the value."""
        return annotation(op).requires_grad and self.specs.requires_grad(value.node)

    def _kept(self, op: fx.Node, value: TensorValue) -> bool:
        """Return whether the op's backward needs the parameter for another operand's gradient."""
        if value.node.op != "get_attr" or not self._flows(op, value) or not is_heavy(op):
            return False
        others = [o for o in operands(op) if o.op != "get_attr"]
        return any(map(self.specs.requires_grad, others))

    def _given(self, placed: SolverNode, index: int) -> list[Port]:
        found: dict[Port, None] = {}
        for option in placed.options:
            found[option.gives[index] if isinstance(option, OpOption) else option] = None
        return list(found)

    def _numbered(self, placed: SolverNode, position: int, what: str) -> int:
        """Return the number of the ports, by option, at one position of a node."""
        key = (id(placed.options), position, what)
        if key not in self._ports:
            self._referenced_options.append(
                placed.options
            )  # a reference, so that its id stays unique
            ports = [
                o if not isinstance(o, OpOption)
                else o.gives[position] if what == "gives" else o.takes[position]
                for o in placed.options
            ]  # fmt: skip
            self._ports[key] = self.reshards.ports(ports)
        return self._ports[key]

    def _matrix(
        self,
        value: TensorValue,
        giver: SolverNode,
        index: int,
        taker: SolverNode,
        position: int,
        flows: bool,
        regathered: bool = False,
    ) -> Matrix:
        """Return the seconds per step by the solver's strategies of both nodes."""
        rows, columns = (
            self._numbered(giver, index, "gives"),
            self._numbered(taker, position, "takes"),
        )
        size = self._domains.bytes(value)
        key = (rows, columns, size, flows, regathered, giver.number, taker.number)
        if key not in self._gathered:
            found = self.microbatches * self.reshards.matrix(rows, columns, size, flows, regathered)
            if giver.map is not None:
                found = found[giver.map]
            if taker.map is not None:
                found = found[:, taker.map]
            self._gathered[key] = found
        return self._gathered[key]

    def _edge(
        self,
        value: TensorValue,
        taker: SolverNode,
        position: int,
        flows: bool,
        regathered: bool = False,
    ) -> None:
        giver, index = self.givers[value]
        matrix = self._matrix(value, giver, index, taker, position, flows, regathered)
        if giver.root == taker.root:
            node = self.nodes[giver.root]
            node.seconds = node.seconds + matrix.diagonal()
        elif matrix.any():
            self._pairs.setdefault((giver.root, taker.root), []).append((id(matrix), matrix))

    def _whole(self, value: TensorValue) -> None:
        """Require that the loss is replicated on every rank."""
        whole: Placements = (REPLICATE,) * len(self.mesh.axes)
        giver, index = self.givers[value]
        end = SolverNode(0, ((whole, whole),))
        matrix = self._matrix(value, giver, index, end, 0, flows=False)
        node = self.nodes[giver.root]
        node.seconds = node.seconds + matrix[:, 0]

    # -- the problem ---------------------------------------------------------------------------

    def _live(self) -> tuple[dict[int, NDArray[np.float64]], tuple[tuple[int, ...], ...]]:
        """Return temporary bytes by strategy of the nodes alive at memory peaks, and the peaks.

        Of several tensors of one node those that are alive together count.
        """
        most: dict[int, NDArray[np.float64]] = {}
        found: dict[tuple[int, ...], None] = {}
        for alive in find_memory_peaks(self.flow, self.specs, self.sizes):
            here: dict[int, NDArray[np.float64]] = {}
            for value in alive:
                placed = self.ops[value.node]
                size = self._domains.bytes(value)
                own = np.array([
                    size / self._parts(o.gives[value.index][0])
                    for o in placed.options if isinstance(o, OpOption)
                ])  # fmt: skip
                local_bytes = own if placed.map is None else own[placed.map]
                here[placed.root] = here.get(placed.root, 0.0) + local_bytes
            for root, local_bytes in here.items():
                most[root] = np.maximum(most[root], local_bytes) if root in most else local_bytes
            found[tuple(sorted(here))] = None
        return most, tuple(found)

    def _parts(self, placements: Placements) -> int:
        """Return the number of parts into which the mesh shards a tensor."""
        cut = zip(placements, self.mesh.shape, strict=True)
        return prod(parts for p, parts in cut if isinstance(p, Shard))

    def _problem(self, budget: float) -> PlacementProblem:
        kinds: dict[bytes, int] = {}
        made: list[NodeCosts] = []
        nodes = []
        temporary, moments = self._live()
        for number, node in enumerate(self.nodes):
            live = temporary.get(number, np.zeros(0))
            key = node.seconds.tobytes() + node.standing.tobytes() + live.tobytes()
            if key not in kinds:
                kinds[key] = len(made)
                rows = [tuple(row.tolist()) for row in (node.seconds, node.standing, live)]
                made.append(NodeCosts(seconds=rows[0], standing=rows[1], temporary=rows[2]))
            nodes.append(kinds[key])
        numbers: dict[object, int] = {}
        matrices: list[tuple[tuple[float, ...], ...]] = []
        edges = []
        for (source, target), parts in self._pairs.items():
            same = tuple(sorted(identity for identity, _ in parts))
            if same not in numbers:
                numbers[same] = len(matrices)
                total = sum(matrix for _, matrix in parts)
                matrices.append(tuple(map(tuple, np.asarray(total).tolist())))
            edges.append(PlacementEdge(source=source, target=target, matrix=numbers[same]))
        return PlacementProblem(
            names=tuple(node.name for node in self.nodes),
            kinds=tuple(made),
            nodes=tuple(nodes),
            matrices=tuple(matrices),
            edges=tuple(edges),
            budget=budget,
            points=moments,
        )
