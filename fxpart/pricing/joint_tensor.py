"""Placements of each kind of block under a tensor degree, selected by the solver, and their cost.

For one block of each kind, :mod:`fxpart.pricing.placement_builder` selects every op's strategy on a
mesh of ``tensor`` ranks, at one microbatch size, with all values that enter or leave a block
replicated, and without sharding of batch rows (which is data parallelism). The choice minimizes the
step time. At every size the selected strategies are then priced op by op as for one rank, and each
change of placement as a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import sympy
from torch import fx

from fxpart.costmodels.efficiency import update_bandwidth, update_launch
from fxpart.costs import OpSpec, TensorSpec
from fxpart.pricing.joint_block_kinds import SavedStorage
from fxpart.pricing.joint_collectives import PlacementCollectives, port_of
from fxpart.pricing.joint_cost_sheet import BlockCollective, BlockLayout
from fxpart.pricing.joint_sample_graph import AXIS, SampleGraph
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.placement_builder import PlacementProblemBuilder
from fxpart.pricing.placement_edges import Port, ReshardCosts
from fxpart.pricing.placement_graph import GraphDataflow, find_fused_strategies, read_dataflow
from fxpart.pricing.placement_mapping import PlacementMapping, StateCosts
from fxpart.pricing.placement_options import OpFamilies, OpOption, positions
from fxpart.pricing.sparse_gradients import find_large_embedding_tables
from fxpart.pricing.specs import Specs, annotation
from fxpart.sharding import PARTIAL, Mesh, Placements, Shard
from fxpart.solver.placement.portfolio import evaluate, solve_placement

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.costs import CostModel, Size
    from fxpart.pricing.variants import Sizes
    from fxpart.solver.problem import Weight

_AMPLE = 1e18  # bytes: no memory limit, so that the fastest choice is found


@dataclass(frozen=True)
class TensorLayoutContext:
    """Conditions of the selection: sizes, device, ring of ranks, microbatches per step."""

    model: CostModel
    specs: Specs
    sizes: Sizes
    device: Device
    ring: tuple[Link, ...]
    microbatches: int
    state: Mapping[str, StateCosts]


class TensorParallelLayout(BlockLayout):
    """Blocks shared by ``parts`` ranks: the option of each op's copy, the port of each state."""

    def __init__(
        self,
        parts: int,
        samples: SampleGraph,
        flow: GraphDataflow,
        chosen: Mapping[fx.Node, OpOption],
        state_ports: Mapping[str, Port],
        messages: tuple[BlockCollective, ...],
    ) -> None:
        """Record for each saved storage of an op the tensor whose sharding it shares."""
        self.parts, self.messages = parts, messages
        self._samples, self._flow, self._chosen, self._state_ports = (
            samples,
            flow,
            chosen,
            state_ports,
        )
        self._tensor_of_storage: dict[tuple[fx.Node, int], tuple[str, int]] = {}
        self._stored: dict[int, Size] = {}
        for node, kept in flow.kept.items():
            numbers = dict.fromkeys(saved.storage for saved in annotation(node).saved)
            for number, each in zip(numbers, kept, strict=True):
                self._tensor_of_storage[node, number] = each.tensor

    @property
    def cuts(self) -> bool:
        """Return whether anything is sharded."""
        ports = [p for o in self._chosen.values() for p in (*o.takes, *o.gives)]
        return any(_is_cut(place) for place, _ in ports)

    @property
    def lean(self) -> bool:
        """Return whether some parameter is sharded, and every large embedding table."""
        sharded = {name: _is_cut(place) for name, (place, _) in self._state_ports.items()}
        heavy = find_large_embedding_tables(self._samples.graph)
        return any(sharded.values()) and all(sharded.get(name, True) for name in heavy)

    def op(self, node: fx.Node, spec: OpSpec) -> OpSpec:
        """Return the op on the rank's part."""
        option = self._chosen.get(self._samples.of[node])
        if option is None:
            return spec
        inputs = [
            tensor
            if at is None or at >= len(option.takes)
            else self._local(tensor, option.takes[at][0])
            for tensor, at in zip(spec.inputs, positions(node), strict=True)
        ]
        outputs = [
            tensor if at >= len(option.gives) else self._local(tensor, option.gives[at][0])
            for at, tensor in enumerate(spec.outputs)
        ]
        return OpSpec(
            spec.name, tuple(inputs), tuple(outputs), spec.attributes, spec.gradients,
            spec.gradient_inputs,
        )  # fmt: skip

    def tensors(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of the node's tensors."""
        if node.op == "get_attr" and str(node.target) in self._state_ports:
            return tuple(self._local(t, self._state_ports[str(node.target)][0]) for t in whole)
        copy = self._samples.of.get(node)
        value = self._flow.value.get(copy) if copy is not None else None
        source = value.node if value is not None else copy
        option = self._chosen.get(source) if source is not None else None
        if option is None:
            return whole
        first = value.index if value is not None else 0
        ports = option.gives[first : first + len(whole)]
        if len(ports) != len(whole):
            return whole
        return tuple(self._local(t, port[0]) for t, port in zip(whole, ports, strict=True))

    def storage(self, storage: SavedStorage) -> Size:
        """Return the rank's bytes: a part where every op that saves it has it sharded."""
        if id(storage) not in self._stored:
            self._stored[id(storage)] = self._storage(storage)
        return self._stored[id(storage)]

    def _storage(self, storage: SavedStorage) -> Size:
        copies = [self._samples.of.get(node) for node in storage.savers]
        shared = storage.shared and storage.maker not in self._samples.free
        if shared or not all(c is not None and self._part(c, storage.number) for c in copies):
            return storage.size
        return divide_size(storage.size, self.parts)

    def _part(self, node: fx.Node, number: int) -> bool:
        found, option = self._tensor_of_storage.get((node, number)), self._chosen.get(node)
        if found is None or option is None:
            return False
        ports = option.takes if found[0] == "operand" else option.gives
        return found[1] < len(ports) and _is_cut(ports[found[1]][0])

    def weight(self, weight: Weight) -> int:
        """Return the number of parts into which a parameter is sharded."""
        port = self._state_ports.get(weight.name)
        return self.parts if port is not None and _is_cut(port[0]) else 1

    def waits(self, weight: Weight) -> bool:
        """Return whether its gradient is reduced over the ranks per step."""
        port = self._state_ports.get(weight.name)
        return bool(weight.gradient) and port is not None and port[1] == (PARTIAL,)

    def _local(self, tensor: TensorSpec, placements: Placements) -> TensorSpec:
        (place,) = placements
        if not isinstance(place, Shard):
            return tensor
        shape = list(tensor.shape)
        if isinstance(place.outer, str) or place.outer == 1:
            shape[place.dim] = divide_size(shape[place.dim], self.parts)
        else:
            shape[place.dim] = place.outer * divide_size(shape[place.dim], self.parts * place.outer)
        return TensorSpec(tuple(shape), tensor.dtype, tensor.layout)


class TensorLayoutSolver:
    """Selects placements for one graph of samples, for one tensor degree after another."""

    def __init__(self, samples: SampleGraph) -> None:
        """Create it; the common part of all degrees is computed with the first of them."""
        self._samples = samples
        self._families: OpFamilies | None = None
        self._flow: GraphDataflow | None = None

    def __call__(
        self, tensor: int, at: TensorLayoutContext, time_limit: float = 10.0
    ) -> TensorParallelLayout:
        """Return the fastest placements of every kind of block on ``tensor`` ranks.

        Where these replicate all parameters (small blocks, slow links), the fastest that need at
        most about half of the memory that sharding can save.
        """
        builder = self._builder(tensor, at)
        return self._solved(tensor, builder.build(_AMPLE), builder, time_limit)

    def _builder(self, tensor: int, at: TensorLayoutContext) -> PlacementProblemBuilder:
        mesh = Mesh(((AXIS, tensor),))
        copying = NonOpCosts.of(at.model, at.device).copying
        reshards = ReshardCosts(mesh, at.model, lambda _: at.ring, copying)
        families = OpFamilies(
            mesh, at.model, at.device, reshards, at.sizes, at.specs, at.microbatches, frozenset(),
            self._families,
        )  # fmt: skip
        if self._flow is None:
            self._flow = read_dataflow(self._samples.graph, at.specs, at.sizes)
            find_fused_strategies(self._flow, families)
            self._families = families
        return PlacementProblemBuilder(
            mesh=mesh, flow=self._flow, families=families, reshards=reshards, specs=at.specs,
            sizes=at.sizes, state=at.state, microbatches=at.microbatches,
            bandwidth=update_bandwidth(at.device), launch=update_launch(at.device),
        )  # fmt: skip

    def _solved(
        self,
        tensor: int,
        built: PlacementMapping,
        builder: PlacementProblemBuilder,
        time_limit: float,
    ) -> TensorParallelLayout:
        problem = built.problem
        choice = solve_placement(problem, time_limit=time_limit).choice
        assert choice is not None, "without a budget some choice is feasible"
        found = self._cut(tensor, built, builder, choice)
        if found.lean:
            return found
        budget = evaluate(problem, choice).bytes * (1 + 1 / tensor) / 2
        tight = msgspec.structs.replace(problem, budget=budget)
        other = solve_placement(tight, time_limit=time_limit, solver="elimination").choice
        return found if other is None else self._cut(tensor, built, builder, other)

    def _cut(
        self,
        tensor: int,
        built: PlacementMapping,
        builder: PlacementProblemBuilder,
        choice: Sequence[int],
    ) -> TensorParallelLayout:
        chosen: dict[fx.Node, OpOption] = {}
        for node, placed in built.ops.items():
            option = placed.options[placed.at(choice[placed.root])]
            assert isinstance(option, OpOption), "ops have options"
            chosen[node] = option
        ports = {n: port_of(p, 0, choice) for n, p in built.sources.items()}
        state_ports = {str(n.target): port for n, port in ports.items() if n.op == "get_attr"}
        messages = tuple(PlacementCollectives(self._samples, builder, choice, chosen, ports).all())
        return TensorParallelLayout(
            tensor, self._samples, builder.flow, chosen, state_ports, messages
        )


def _is_cut(placements: Placements) -> bool:
    return any(isinstance(place, Shard) for place in placements)


def divide_size(size: Size, parts: int) -> Size:
    """Return the largest of ``parts`` parts; symbolic where the size is."""
    if isinstance(size, int):
        return -(-size // parts)
    return sympy.ceiling(size / parts)
