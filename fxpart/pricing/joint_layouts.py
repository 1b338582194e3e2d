"""Layouts for every tensor and expert degree: one rank's part of each kind of block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Protocol

from torch import fx

from fxpart.compiler import MESH_KEY
from fxpart.plan.offload import Offload
from fxpart.pricing.host_offload import HostOffload
from fxpart.pricing.joint_block_kinds import find_kinds
from fxpart.pricing.joint_context import ContextParallelLayout
from fxpart.pricing.joint_cost_sheet import BlockCostSheet, BlockLayout, SampleOps
from fxpart.pricing.joint_device_pools import DevicePool, ReplicaCollectiveTimes
from fxpart.pricing.joint_experts import ExpertParallelLayout, find_mixtures
from fxpart.pricing.joint_microbatches import MicrobatchRows
from fxpart.pricing.joint_ops import OpPrices
from fxpart.pricing.joint_sample_graph import samples
from fxpart.pricing.joint_space import (
    SearchSpace,
    context_degrees,
    expert_degrees,
    tensor_degrees,
)
from fxpart.pricing.joint_tensor import (
    TensorLayoutContext,
    TensorLayoutSolver,
    TensorParallelLayout,
)
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.placement_edges import ReshardCosts
from fxpart.pricing.placements import state_costs
from fxpart.pricing.specs import Specs
from fxpart.pricing.weights import trained_names, weights
from fxpart.sharding import Mesh
from fxpart.solver.joint.problem import JointTiedParameter, ParallelLayout, ParameterFootprint

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel
    from fxpart.compat.optimizer_choice import OptimizerChoice
    from fxpart.costs import CostModel
    from fxpart.solver.problem import Weight

_STEP = 32  # most microbatches per step for which placements are selected


Degrees = tuple[int, int, int]  # ranks that share a block, expert degree, context degree


class SequencePlacements(Protocol):
    """Placements of a graph under context parallelism."""

    @property
    def tokens(self) -> int:
        """The common divisor of the lengths of all sequences with attention; 0 without any."""
        ...

    def place(self, ranks: int) -> fx.GraphModule:
        """Return the graph on a mesh of so many ranks, with all placements."""
        ...


class ModelBlocks:
    """One graph's kinds of blocks, with its parameters."""

    def __init__(
        self,
        graph: fx.GraphModule,
        captured: CapturedModel,
        optimizer: OptimizerChoice,
    ) -> None:
        """Find kinds and tied parameters."""
        self.graph, self.captured, self.optimizer = graph, captured, optimizer
        self.trained = trained_names(captured) if captured.training else frozenset()
        self.specs = Specs(self.trained)
        found = weights(graph.graph, captured, self.trained, optimizer)
        self.kinds = find_kinds(graph, self.specs, found)
        self.tied = tuple(w for w in found if len(w.blocks) > 1)
        self.ties = tuple(
            JointTiedParameter(name=w.name, blocks=w.blocks, buffer=w.buffer) for w in self.tied
        )
        self.mixtures = find_mixtures(self.kinds)


class ModelLayouts:
    """One model under all degrees. sheets: by (ranks that share a block, expert, context)."""

    def __init__(
        self,
        model: ModelBlocks,
        costs: CostModel,
        pools: tuple[DevicePool, ...],
        lines: ReplicaCollectiveTimes,
        rows: MicrobatchRows,
        space: SearchSpace,
        sequences: SequencePlacements | None = None,
        hosts: Mapping[Offload, HostOffload] | None = None,
    ) -> None:
        """Select placements for each tensor degree, distribute experts for each expert degree.

        sequences: placements for each context degree. hosts: what may be offloaded; None: nothing.
        """
        self.model, self.pools, self.lines = model, pools, lines
        self.hosts = hosts or {"none": HostOffload()}
        self.rows, self.space = rows, space
        self.kinds = model.kinds
        self.prices = OpPrices(costs)
        self._ops = SampleOps.of(model.graph, self.kinds, model.specs)
        cuts: dict[int, BlockLayout] = {1: BlockLayout()}
        for tensor in self._tensor_degrees():
            cut = self._cut(tensor)
            if cut.cuts:
                cuts[tensor] = cut
        self.sheets: dict[Degrees, BlockCostSheet] = {
            (tensor, expert, 1): self._sheet(
                cut
                if expert == 1
                else ExpertParallelLayout(cut, expert, model.mixtures, model.specs),
            )
            for tensor, cut in cuts.items()
            for expert in self._expert_degrees()
        }
        if sequences is not None:
            for context in self._context_degrees(sequences.tokens):
                shared = self._share(context, sequences.place(context))
                self.sheets[context, 1, context] = self._sheet(shared)

    @cached_property
    def all(self) -> tuple[ParallelLayout, ...]:
        """Return the parameter bytes of every layout, by what is offloaded."""
        return tuple(
            self._layout(found, offload) for offload in self.hosts for found in sorted(self.sheets)
        )

    def host(self, layout: int) -> HostOffload:
        """Return what a layout offloads."""
        return self.hosts[self.all[layout].offload]

    def sheet(self, layout: int) -> BlockCostSheet:
        """Return the costs of a layout."""
        found = self.all[layout]
        return self.sheets[found.tensor, found.expert, found.context]

    def _tensor_degrees(self) -> list[int]:
        """Return the degrees above one for which some pool has devices."""
        requested = self.space.tensor
        degrees = {
            t
            for place in self.pools
            for t in (
                tensor_degrees(place.pool.host, place.pool.devices)
                if requested is None
                else requested
            )
            if 1 < t <= place.pool.devices
        }
        return sorted(degrees)

    def _context_degrees(self, tokens: int) -> list[int]:
        """Return the degrees above one for sequences of ``tokens``; none without attention."""
        requested = self.space.context
        degrees = {
            c
            for place in self.pools
            for c in requested or context_degrees(tokens, place.pool.host, place.pool.devices)
            if 1 < c <= place.pool.devices and tokens and tokens % c == 0
        }
        return sorted(degrees)

    def _share(self, ranks: int, placed: fx.GraphModule) -> ContextParallelLayout:
        """Return the part of each of ``ranks`` ranks that share sequences."""
        place = next(p for p in self.pools if p.pool.devices >= ranks)
        ring = self.lines.ring(place, ranks, 1)
        copying = NonOpCosts.of(self.prices.model, place.sample).copying
        mesh: Mesh = placed.meta[MESH_KEY]
        reshards = ReshardCosts(mesh, self.prices.model, lambda _: ring, copying)
        return ContextParallelLayout(
            self.model.graph, placed, self.kinds, self.model.specs,
            self.rows.at(self._rows_of_cuts), reshards.list_collectives,
        )  # fmt: skip

    def _expert_degrees(self) -> tuple[int, ...]:
        """Return the degrees that divide the experts of every mixture; 1 where there are none."""
        number = gcd(*self.model.mixtures.numbers) if self.model.mixtures.numbers else 0
        devices = max(p.pool.devices for p in self.pools)
        requested = self.space.expert
        if requested is None or not number:
            return expert_degrees(number, devices)
        found = tuple(e for e in sorted(set(requested)) if e <= devices and number % e == 0)
        return found or (1,)

    @property
    def note(self) -> str:
        """Describe the source of the costs of tensor parallelism."""
        degrees = ", ".join(
            str(t) for t in sorted({t for t, _, c in self.sheets if c == 1}) if t > 1
        )
        return (
            f"degrees {degrees}: placements of one block of each kind selected by the solver, "
            "values between blocks replicated"
            if degrees
            else "no degree above 1 shards anything"
        )

    def _sheet(self, cut: BlockLayout) -> BlockCostSheet:
        return BlockCostSheet(self._ops, self.prices, cut)

    def _cut(self, tensor: int) -> TensorParallelLayout:
        """Return the placements on ``tensor`` ranks, selected for the first pool that has them."""
        place = next(p for p in self.pools if p.pool.devices >= tensor)
        rows = self._rows_of_cuts
        count = max(1, min(_STEP, self.rows.batch // rows))
        context = TensorLayoutContext(
            self.prices.model, self.model.specs, self.rows.at(rows), place.sample,
            self.lines.ring(place, tensor, 1), count,
            state_costs(
                self.model.captured, self.model.trained, self.model.optimizer, count,
                self.model.graph.graph,
            ),
        )  # fmt: skip
        return self._cutter(tensor, context)

    @cached_property
    def _rows_of_cuts(self) -> int:
        """Return the rows for which placements are selected: the most with which a block fits.

        Tensor parallelism is used for large microbatches; with small ones latencies would dominate.
        """
        sheet, limit = self._sheet(BlockLayout()), self.pools[0].pool.memory
        for rows in reversed(self.rows.needed()):
            memory = sheet.bytes(self.rows.at(rows))
            pairs = zip(memory.activation["none"], memory.workspace["none"], strict=True)
            if max(map(sum, pairs)) <= limit:
                return rows
        return self.rows.needed()[0]

    @cached_property
    def _cutter(self) -> TensorLayoutSolver:
        return TensorLayoutSolver(samples(self.kinds))

    def _layout(self, degrees: Degrees, offload: Offload) -> ParallelLayout:
        """Return the bytes on a rank; separately for experts where they are distributed."""
        tensor, expert, context = degrees
        host = self.hosts[offload]
        tied = tuple(map(host.weight, self.model.tied))
        cut = self.sheets[degrees].cut
        experts = self.model.mixtures.weights if expert > 1 else frozenset()

        def parts(weight: Weight, size: int) -> int:
            return -(-size // cut.weight(weight))

        return ParallelLayout(
            tensor=tensor,
            expert=expert,
            context=context,
            offload=offload,
            dense=self._state(degrees, host, lambda w: w.name not in experts),
            experts=self._state(degrees, host, lambda w: w.name in experts) if experts else None,
            buffer=tuple(
                sum(parts(w, w.weight) for w in b.own if w.buffer) for b in self.kinds.samples
            ),
            tie_weight=tuple(parts(w, w.weight) for w in tied),
            tie_gradient=tuple(parts(w, w.gradient) for w in tied),
            tie_optimizer=tuple(parts(w, w.optimizer) for w in tied),
        )

    def _state(
        self, degrees: Degrees, host: HostOffload, of: Callable[[Weight], bool]
    ) -> ParameterFootprint:
        """Return parameter bytes by kind of block; tied ones update with their first block."""
        cut = self.sheets[degrees].cut
        rows: dict[str, list[int]] = {"weight": [], "gradient": [], "optimizer": []}
        unsent = []
        for block in self.kinds.samples:
            own = [host.weight(w) for w in block.own if of(w) and not w.buffer]
            local_weights = self._local(own, cut)
            for part, row in rows.items():
                row.append(sum(getattr(w, part) for w in local_weights))
            # Rows are all-gathered, which moves half of the bytes of an all-reduce.
            unsent.append(sum(w.gradient - w.rows // 2 for w in local_weights if w.sparse))
        step = []
        for place in self.pools:
            ring = self.lines.ring(place, degrees[0], 1)
            line = self.lines.line("partial", "replicate", ring)
            costs = NonOpCosts.of(self.prices.model, place.sample)
            seconds = []
            for block in self.kinds.samples:
                updated = [host.weight(w) for w in (*block.own, *block.first) if of(w)]
                waiting = sum(w.gradient for w in updated if cut.waits(w))
                stepped = costs.updates(self._local(updated, cut), 1)
                seconds.append(sum(stepped) + line(waiting))
            step.append(tuple(seconds))
        return ParameterFootprint(
            weight=tuple(rows["weight"]), gradient=tuple(rows["gradient"]),
            optimizer=tuple(rows["optimizer"]), step=tuple(step),
            unsent=tuple(unsent) if any(unsent) else (),
        )  # fmt: skip

    def _local(self, local_weights: Sequence[Weight], cut: BlockLayout) -> tuple[Weight, ...]:
        """Return one rank's part of the parameters, all in one block."""
        return tuple(
            type(w)(
                name=w.name, blocks=(0,), weight=-(-w.weight // cut.weight(w)),
                gradient=-(-w.gradient // cut.weight(w)),
                optimizer=-(-w.optimizer // cut.weight(w)), buffer=w.buffer,
                sparse=w.sparse, host=-(-w.host // cut.weight(w)),
                copied=-(-w.copied // cut.weight(w)),
            )
            for w in local_weights
        )  # fmt: skip
