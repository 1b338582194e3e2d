"""What a tensor degree does to each kind of block: placements chosen by the solver, and their cost.

For one block of each kind the machinery of placements (:mod:`fxpart.pricing.placement_builder`)
chooses every op's strategy on a mesh of ``tensor`` ranks, at one microbatch size, with all values
that enter or leave a block whole on every rank, and the rows of the batch never cut (that is what
data replicas do). The choice minimises seconds of a step. At every size the chosen strategies are
then priced op by op as for one rank, and each change of placement as a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import sympy
from torch import fx

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

_AMPLE = 1e18  # bytes: the cheapest choice in seconds is wanted, whatever it needs


@dataclass(frozen=True)
class TensorLayoutContext:
    """At what the placements are chosen: sizes, device, ring of the ranks, microbatches a step."""

    model: CostModel
    specs: Specs
    sizes: Sizes
    device: Device
    ring: tuple[Link, ...]
    microbatches: int
    state: Mapping[str, StateCosts]


class TensorParallelLayout(BlockLayout):
    """Blocks shared by ``parts`` ranks: by copy of an op its option, by state where it lies."""

    def __init__(
        self,
        parts: int,
        samples: SampleGraph,
        flow: GraphDataflow,
        chosen: Mapping[fx.Node, OpOption],
        lies: Mapping[str, Port],
        messages: tuple[BlockCollective, ...],
    ) -> None:
        """Note by op and storage which of its tensors the storage is cut like."""
        self.parts, self.messages = parts, messages
        self._samples, self._flow, self._chosen, self._lies = samples, flow, chosen, lies
        self._kept: dict[tuple[fx.Node, int], tuple[str, int]] = {}
        self._stored: dict[int, Size] = {}
        for node, kept in flow.kept.items():
            numbers = dict.fromkeys(saved.storage for saved in annotation(node).saved)
            for number, each in zip(numbers, kept, strict=True):
                self._kept[node, number] = each.tensor

    @property
    def cuts(self) -> bool:
        """Whether anything is cut at all."""
        ports = [p for o in self._chosen.values() for p in (*o.takes, *o.gives)]
        return any(_is_cut(place) for place, _ in ports)

    @property
    def lean(self) -> bool:
        """Whether some parameter is cut, and every table that is a large part of all state."""
        held = {name: _is_cut(place) for name, (place, _) in self._lies.items()}
        heavy = find_large_embedding_tables(self._samples.graph)
        return any(held.values()) and all(held.get(name, True) for name in heavy)

    def op(self, node: fx.Node, spec: OpSpec) -> OpSpec:
        """The op on what the rank holds."""
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
        """The node's tensors as the rank holds them."""
        if node.op == "get_attr" and str(node.target) in self._lies:
            return tuple(self._local(t, self._lies[str(node.target)][0]) for t in whole)
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
        """Bytes that the rank keeps: a part where every op that keeps it has it cut."""
        if id(storage) not in self._stored:
            self._stored[id(storage)] = self._storage(storage)
        return self._stored[id(storage)]

    def _storage(self, storage: SavedStorage) -> Size:
        copies = [self._samples.of.get(node) for node in storage.savers]
        shared = storage.shared and storage.maker not in self._samples.free
        if shared or not all(c is not None and self._part(c, storage.number) for c in copies):
            return storage.size
        return _divided(storage.size, self.parts)

    def _part(self, node: fx.Node, number: int) -> bool:
        found, option = self._kept.get((node, number)), self._chosen.get(node)
        if found is None or option is None:
            return False
        ports = option.takes if found[0] == "operand" else option.gives
        return found[1] < len(ports) and _is_cut(ports[found[1]][0])

    def weight(self, weight: Weight) -> int:
        """Into how many parts a parameter is cut."""
        port = self._lies.get(weight.name)
        return self.parts if port is not None and _is_cut(port[0]) else 1

    def waits(self, weight: Weight) -> bool:
        """Whether its gradient is a sum over the ranks that is made once a step."""
        port = self._lies.get(weight.name)
        return bool(weight.gradient) and port is not None and port[1] == (PARTIAL,)

    def _local(self, tensor: TensorSpec, placements: Placements) -> TensorSpec:
        (place,) = placements
        if not isinstance(place, Shard):
            return tensor
        shape = list(tensor.shape)
        if place.outer == 1:
            shape[place.dim] = _divided(shape[place.dim], self.parts)
        else:
            shape[place.dim] = place.outer * _divided(shape[place.dim], self.parts * place.outer)
        return TensorSpec(tuple(shape), tensor.dtype, tensor.layout)


class TensorLayoutSolver:
    """Chooses placements for one graph of samples, for one tensor degree after another."""

    def __init__(self, samples: SampleGraph) -> None:
        """What the degrees have in common is found with the first of them."""
        self._samples = samples
        self._families: OpFamilies | None = None
        self._flow: GraphDataflow | None = None

    def __call__(
        self, tensor: int, at: TensorLayoutContext, time_limit: float = 10.0
    ) -> TensorParallelLayout:
        """The cheapest placements of every kind of block on ``tensor`` ranks.

        Where these leave all parameters whole on each rank (small blocks, slow links), the cheapest
        that need at most about half of what that saves at best.
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
            bandwidth=at.device.bandwidth, launch=at.device.launch,
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
        assert choice is not None, "without a budget there is a choice"
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
        lies = {str(n.target): port for n, port in ports.items() if n.op == "get_attr"}
        messages = tuple(PlacementCollectives(self._samples, builder, choice, chosen, ports).all())
        return TensorParallelLayout(tensor, self._samples, builder.flow, chosen, lies, messages)


def _is_cut(placements: Placements) -> bool:
    return any(isinstance(place, Shard) for place in placements)


def _divided(size: Size, parts: int) -> Size:
    """The largest of ``parts`` parts; an expression where the size is one."""
    if isinstance(size, int):
        return -(-size // parts)
    return sympy.ceiling(size / parts)
