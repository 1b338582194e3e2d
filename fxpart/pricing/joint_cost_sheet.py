"""Time and memory of each kind of block at any microbatch size, under one tensor degree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import fx

from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.pricing.joint_block_kinds import BlockKinds, BlockOutput, SavedStorage
from fxpart.pricing.joint_ops import OpPrices, Row
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.recompute_costs import (
    RecomputedBlock,
    is_freed,
    is_product,
    recompute_block,
    store_block,
)
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes
from fxpart.pricing.workspace import BlockScope, Workspace

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.costs import OpSpec, Size, TensorSpec
    from fxpart.solver.problem import Recompute, Weight

Axis = Literal["tensor", "expert"]


@dataclass(frozen=True)
class BlockCollective:
    """A collective of a block's ranks over ``size`` bytes in all. back: in the backward.

    axis: the mesh axis of its ranks.
    """

    kind: int
    source: str
    target: str
    size: Size
    back: bool
    axis: Axis = "tensor"


class BlockLayout:
    """One rank's part of each block: all of it. Tensor degrees above one override the methods."""

    parts: int = 1
    messages: tuple[BlockCollective, ...] = ()

    def op(self, node: fx.Node, spec: OpSpec) -> OpSpec:
        """Return the op on the rank's part."""
        del node
        return spec

    def tensors(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of the node's tensors."""
        del node
        return whole

    def shared(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Return the rank's part of a value that other blocks use, by default all of it."""
        del node
        return whole

    def storage(self, storage: SavedStorage) -> Size:
        """Return the rank's bytes of a saved storage."""
        return storage.size

    def weight(self, weight: Weight) -> int:
        """Return the number of parts into which a parameter is sharded."""
        del weight
        return 1

    def waits(self, weight: Weight) -> bool:
        """Return whether its gradient is reduced over the ranks per step."""
        del weight
        return False


class _LocalSpecs(Specs):
    """Specs of one rank's part of each value."""

    def __init__(self, specs: Specs, cut: BlockLayout) -> None:
        super().__init__(())
        self._specs, self._cut = specs, cut

    def tensors(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        return self._cut.tensors(node, self._specs.tensors(node))

    def requires_grad(self, node: fx.Node) -> bool:
        return self._specs.requires_grad(node)


@dataclass(frozen=True)
class BlockTimes:
    """Forward and backward times of the ops by kind, recomputation by mode, and collectives."""

    forward: Row
    backward: Row
    again: Mapping[Recompute, Row]


@dataclass(frozen=True)
class BlockMemory:
    """By kind and mode: bytes saved for the backward, and live while the block runs.

    largest: bytes of the largest tensor that autograd saves.
    """

    activation: Mapping[Recompute, tuple[int, ...]]
    workspace: Mapping[Recompute, tuple[int, ...]]
    largest: int = 0


@dataclass(frozen=True)
class SampleOps:
    """The ops of one block of each kind, described once for all layouts: (kind, node, op)."""

    kinds: BlockKinds
    specs: Specs
    scope: BlockScope
    ops: tuple[tuple[int, fx.Node, OpSpec], ...]

    @staticmethod
    def of(graph: fx.GraphModule, kinds: BlockKinds, specs: Specs) -> SampleOps:
        """Return the ops of a graph's kinds."""
        scope = BlockScope.of(graph.graph, {block.index for block in kinds.samples})
        ops = [
            (kind, node, spec)
            for kind, block in enumerate(kinds.samples)
            for node in block.nodes
            if (spec := specs.op(node)) is not None
        ]
        return SampleOps(kinds, specs, scope, tuple(ops))


@dataclass(frozen=True)
class _LocalSizes:
    """Sizes of one rank's part of a block at one microbatch size."""

    sheet: BlockCostSheet
    sizes: Sizes

    def storage(self, storage: SavedStorage) -> int:
        return self.sizes.number(self.sheet.cut.storage(storage))

    def output(self, output: BlockOutput) -> int:
        return self._shared(output.node)

    def _shared(self, node: fx.Node) -> int:
        whole = self.sheet.cut.shared(node, self.sheet.samples.specs.tensors(node))
        return sum(self.sizes.number(tensor_bytes(tensor)) for tensor in whole)

    def result(self, node: fx.Node) -> int:
        whole = self.sheet.cut.shared(node, self.sheet.samples.specs.tensors(node))
        if node in self.sheet.products:
            whole = self.sheet.products[node].outputs
        return sum(self.sizes.number(tensor_bytes(tensor)) for tensor in whole)

    def op(self, node: fx.Node) -> OpSpec:
        return self.sizes.op(self.sheet.products[node])


@dataclass
class BlockCostSheet:
    """Costs of kinds of blocks under one layout.

    Recomputation repeats kinds of which autograd saves more than the inputs and outputs, and those
    with collectives. products: those ops of a rank that the selective mode may store.
    """

    samples: SampleOps
    prices: OpPrices
    cut: BlockLayout

    def __post_init__(self) -> None:
        """Number every op of the samples, and merge equal ones."""
        kinds, cut = self.samples.kinds, self.cut
        self._count = len(kinds.samples)
        self._kind = [kind for kind, _, _ in self.samples.ops]
        local = [(node, cut.op(node, spec)) for _, node, spec in self.samples.ops]
        self._numbers = [self.prices.number(op) for _, op in local]
        self._place = {node: i for i, (node, _) in enumerate(local)}
        self.products = {node: op for node, op in local if is_product(op)}
        specs = self.samples.specs if cut.parts == 1 else _LocalSpecs(self.samples.specs, cut)
        self._workspace = Workspace(self.samples.scope, specs, len(kinds.of))
        self._stored = [Counter(map(cut.storage, block.storages)) for block in kinds.samples]
        sending = {message.kind for message in cut.messages if not message.back}
        self.full = np.array([
            kind in sending or any(map(is_freed, block.storages))
            for kind, block in enumerate(kinds.samples)
        ])  # fmt: skip
        self._gradients = np.array(
            [
                float(sum(w.gradient // cut.weight(w) for w in (*b.own, *b.tied)))
                for b in kinds.samples
            ]
        )
        self._sent = self._count_collectives()
        self._recomputed: dict[int, list[dict[str, RecomputedBlock]]] = {}

    def _count_collectives(self) -> dict[tuple[str, str, Size, Axis], Row]:
        """Count each distinct collective: [forward, backward][kind]."""
        found: dict[tuple[str, str, Size, Axis], Row] = {}
        for message in self.cut.messages:
            key = (message.source, message.target, message.size, message.axis)
            times = found.setdefault(key, np.zeros((2, self._count)))
            times[1 if message.back else 0, message.kind] += 1
        return found

    def recomputed(self, sizes: Sizes) -> list[dict[str, RecomputedBlock]]:
        """Return each kind as recomputation leaves it, by mode."""
        if id(sizes) not in self._recomputed:
            size = _LocalSizes(self, sizes)
            self._recomputed[id(sizes)] = [
                recompute_block(
                    block, block.inputs, [n for n in block.nodes if n in self.products], size
                )
                if again
                else dict.fromkeys(("selective", "full"), store_block(block, size))
                for block, again in zip(self.samples.kinds.samples, self.full, strict=True)
            ]
        return self._recomputed[id(sizes)]

    def seconds(self, sizes: Sizes, device: Device, *, accumulate: bool) -> BlockTimes:
        """Return the times on one device. accumulate: gradients are added over microbatches.

        Accumulation reads twice and writes once. Full recomputation repeats the whole forward, the
        selective mode all but the products that it stored.
        """
        ahead, back = self.prices.seconds(self._numbers, sizes, device)
        forward, backward = self._by_kind(ahead), self._by_kind(back)
        own = NonOpCosts.of(self.prices.model, device)
        backward = backward + self._gradients * own.gradient(accumulate)
        full = np.where(self.full, forward, 0.0)
        skipped = np.array([
            sum(float(ahead[self._place[node]]) for node in modes["selective"].skipped)
            for modes in self.recomputed(sizes)
        ])  # fmt: skip
        again: dict[Recompute, Row] = {
            "none": np.zeros(self._count),
            "selective": np.maximum(full - skipped, 0.0),
            "full": full,
        }
        return BlockTimes(forward, backward, again)

    def messages(self, sizes: Sizes, rings: Mapping[Axis, tuple[Link, ...]]) -> BlockTimes:
        """Return the times of collectives of tensor and expert parallelism over rings of ranks."""
        total = np.zeros((2, self._count))
        for (source, target, size, axis), times in self._sent.items():
            amount = float(sizes.number(size))
            cost = self.prices.model.reshard(source, target, amount, rings[axis])
            self.prices.sources.add(cost.source)
            total += cost.seconds * times
        forward, backward = total
        none, again = np.zeros(self._count), np.where(self.full, forward, 0.0)
        return BlockTimes(forward, backward, {"none": none, "selective": again, "full": again})

    def bytes(self, sizes: Sizes) -> BlockMemory:
        """Return the memory at one microbatch size."""
        indices = [block.index for block in self.samples.kinds.samples]

        def live(peaks: Sequence[int]) -> tuple[int, ...]:
            return tuple(peaks[index] for index in indices)

        kept: dict[Recompute, tuple[int, ...]] = {}
        lives: dict[Recompute, tuple[int, ...]] = {}
        kept["none"] = tuple(_total(stored, sizes) for stored in self._stored)
        lives["none"] = live(self._workspace.bytes(sizes))
        modes: tuple[Recompute, ...] = ("selective", "full")
        for mode in modes:
            found = [block[mode] for block in self.recomputed(sizes)]
            kept[mode] = tuple(one.stored for one in found)
            products = [each for one in found for each in one.products]
            again = {i for i, one in zip(indices, found, strict=True) if one.again}
            lives[mode] = live(self._workspace.bytes(sizes, again, products))
        saved = (sizes.number(size) for stored in self._stored for size in stored)
        return BlockMemory(kept, lives, max(saved, default=0))

    def _by_kind(self, seconds: Row) -> Row:
        total = np.zeros(self._count)
        np.add.at(total, self._kind, seconds)
        return total


def _total(sizes: Mapping[Size, int], at: Sizes) -> int:
    return sum(times * at.number(size) for size, times in sizes.items())
