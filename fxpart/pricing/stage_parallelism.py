"""Costs per step of sharing a stage's work: gradient reduction, and ZeRO's all-gathers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from fxpart.compiler.node_annotation import PARTIAL_KEY
from fxpart.program.spec import select_zero_axes
from fxpart.sharding import Mesh, count_dim_ranks
from fxpart.solver.problem import Weight

if TYPE_CHECKING:
    from fxpart.codegen.mesh_programs.sharded_graph import ShardedGraph
    from fxpart.costs import CostModel
    from fxpart.pricing.device_groups import Rings

_BUCKET = 25 << 20  # bytes of a gradient bucket
# Bytes read and written for each byte that is packed into a bucket, and for each unpacked.
_PACKED = {
    ("partial", "replicate"): 2,  # pack; the optimizer reads the results in the bucket
    ("partial", "shard(0)"): 2,  # pack; the result is a piece of the bucket
    ("shard(0)", "replicate"): 2,  # unpack; the input is one rank's part
}
# Bytes read and written per byte of a table's rows, where ZeRO shards the table: every rank sums
# the rows of all, selects its range of the flat table, and updates that element by element.
_SETTLED = 38


@dataclass(frozen=True)
class StageParallelism:
    """How the ranks of every stage share its work.

    rows: number of parts of each microbatch; multiple: the divisor of its rows (some inputs may
    have more parts). parts: by symbol the number of parts of the dim that it is read from. partial:
    per parameter the axes over which its gradient is reduced at the end of a step. zero: 1 shards
    optimizer state over ``zero_axis``, 2 gradients too. sharded: per parameter the axes that
    shard it already.
    """

    mesh: Mesh
    rows: int = 1
    multiple: int = 1
    parts: Mapping[str, int] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    zero: int = 0
    zero_axis: str = ""
    sharded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: ShardedGraph) -> StageParallelism:
        """Return the parallelism of a graph whose placements over a mesh are decided."""
        placements = graph.inputs()
        return cls(
            graph.mesh,
            rows=graph.count_batch_parts(),
            multiple=graph.multiple(),
            parts={
                symbol: count_dim_ranks(graph.mesh, placements[name], dim)
                for symbol, (name, dim) in graph.captured.symbols.items()
                if name in placements
            },
            partial=graph.local(0).meta[PARTIAL_KEY],
            zero=graph.zero,
            zero_axis=graph.zero_axis,
            sharded={name: graph.list_axes(placed) for name, placed in graph.state().items()},
        )

    def divided(self, weight: Weight) -> Weight:
        """Return a parameter's bytes on one rank under ZeRO: sharded state, from 2 on gradient.

        The gradient stays whole while a block's backward makes it; with 2 it is kept only until the
        step's reduction, which is counted here as sharded. For an embedding table every rank
        receives the rows of all.
        """
        axes = self.select_zero_axes(weight)
        if not axes or not weight.gradient:
            return weight
        parts = self.mesh.count(*axes)
        whole = self.zero == 1 or weight.sparse
        return msgspec.structs.replace(
            weight,
            temporary=-(-weight.temporary // parts),
            optimizer=-(-weight.optimizer // parts),
            host=-(-weight.host // parts),
            copied=-(-weight.copied // parts),
            gradient=weight.gradient if whole else -(-weight.gradient // parts),
        )

    def list_summed_axes(self, name: str) -> tuple[str, ...]:
        """Return the axes of several ranks over which a parameter's gradient is reduced."""
        axes = self.partial.get(name, ())
        return tuple(axis for axis in axes if self.mesh.shape[self.mesh.index(axis)] > 1)

    def select_zero_axes(self, weight: Weight) -> tuple[str, ...]:
        """Return the axes over which ZeRO 1 and 2 shard a parameter; none at other levels."""
        if self.zero not in (1, 2):
            return ()
        sharded, partial = (of.get(weight.name, ()) for of in (self.sharded, self.partial))
        return select_zero_axes(self.zero_axis, sharded, partial)

    def compute_reduction_times(
        self,
        weights: Sequence[Weight],
        blocks: int,
        model: CostModel,
        rings: Rings,
        copying: float = 0.0,
    ) -> GradientReductionTimes:
        """Return the times per step of gradient reduction and ZeRO's collectives, in seconds.

        A stage's tensors are communicated together in buckets, so that a block pays for its bytes
        only and the stage once for the latency of a first bucket. A tied weight counts for its
        first block. weights: as without ZeRO. copying: seconds per byte that packing or unpacking a
        bucket reads or writes.
        """
        bytes_of: defaultdict[tuple[int, str, str, tuple[str, ...]], int] = defaultdict(int)
        settled: defaultdict[int, int] = defaultdict(int)
        for weight in weights:
            if not weight.gradient:
                continue
            block, axes = weight.blocks[0], self.partial.get(weight.name, ())
            if weight.sparse:  # every rank receives the rows of all; with ZeRO it selects its own
                for axis in axes:
                    bytes_of[block, "shard(0)", "replicate", (axis,)] += weight.rows
                axes = ()
            gradient = weight.gradient
            if zero := self.select_zero_axes(weight):
                bytes_of[block, "shard(0)", "replicate", zero] += weight.weight
                settled[block] += weight.rows
                if {*zero} <= {*axes}:
                    bytes_of[block, "partial", "shard(0)", zero] += gradient
                axes = tuple(axis for axis in axes if axis not in zero)
                gradient = -(-gradient // self.mesh.count(*zero))  # of this rank's shard
            for axis in axes:
                bytes_of[block, "partial", "replicate", (axis,)] += gradient
        seconds = [settled[block] * _SETTLED * copying for block in range(blocks)]
        first: dict[tuple[str, str, tuple[str, ...]], float] = {}
        for (block, source, target, axes), size in bytes_of.items():
            ring = rings(*axes)
            bucket = model.reshard(source, target, float(_BUCKET), ring).seconds
            seconds[block] += size * (bucket / _BUCKET + packing(source, target) * copying)
            if size:
                first[source, target, axes] = model.reshard(source, target, 1.0, ring).seconds
        return GradientReductionTimes(by_block=tuple(seconds), once=sum(first.values()))


def packing(source: str, target: str) -> int:
    """Return the bytes that are read and written for each byte in a bucket."""
    return _PACKED[source, target]


@dataclass(frozen=True)
class GradientReductionTimes:
    """Seconds per step of gradient reduction: by block, and per stage whatever its blocks."""

    by_block: tuple[float, ...] = ()
    once: float = 0.0
