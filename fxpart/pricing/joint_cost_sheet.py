"""Time and memory of each kind of block at any microbatch size, under one tensor degree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import fx

from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.pricing.joint_block_kinds import BlockKinds, SavedStorage
from fxpart.pricing.joint_ops import OpPrices, Row
from fxpart.pricing.joint_recompute import BlockRecompute
from fxpart.pricing.memory import BlockScope, Workspace
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes

if TYPE_CHECKING:
    from fxpart.cluster.devices import Device, Link
    from fxpart.costs import OpSpec, Size, TensorSpec
    from fxpart.solver.joint.problem import Recompute
    from fxpart.solver.problem import Weight

Axis = Literal["tensor", "expert"]


@dataclass(frozen=True)
class BlockCollective:
    """A collective of a block's ranks over ``size`` bytes in all. back: in the backward.

    giver, node: the op whose result it moves, and the op that uses it. axis: the mesh axis of its
    ranks.
    """

    kind: int
    source: str
    target: str
    size: Size
    back: bool
    node: fx.Node | None = None
    giver: fx.Node | None = None
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
    """By kind and mode: bytes saved for the backward, and live while the block runs."""

    activation: Mapping[Recompute, tuple[int, ...]]
    workspace: Mapping[Recompute, tuple[int, ...]]


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


@dataclass
class BlockCostSheet:
    """Costs of kinds of blocks under one layout.

    again: by kind what the selective mode recomputes. The mode "full" recomputes kinds of which
    autograd saves more than the inputs and outputs, and those with collectives.
    """

    samples: SampleOps
    prices: OpPrices
    cut: BlockLayout
    again: Sequence[BlockRecompute] = ()

    def __post_init__(self) -> None:
        """Number every op of the samples, and merge equal ones."""
        kinds, cut = self.samples.kinds, self.cut
        self._count = len(kinds.samples)
        self._kind = [kind for kind, _, _ in self.samples.ops]
        self._numbers = [self.prices.number(cut.op(n, spec)) for _, n, spec in self.samples.ops]
        place = {node: i for i, (_, node, _) in enumerate(self.samples.ops)}
        self._place = place
        specs = self.samples.specs if cut.parts == 1 else _LocalSpecs(self.samples.specs, cut)
        self._workspace = Workspace(self.samples.scope, specs, len(kinds.of))
        self._remade = [[place[n] for n in chosen.ops if n in place] for chosen in self.again]
        self._stored = [Counter(map(cut.storage, block.storages)) for block in kinds.samples]
        self._freed = [
            Counter(cut.storage(s) for s in block.storages if s.number in chosen.dropped)
            for block, chosen in zip(kinds.samples, self.again or [BlockRecompute()] * self._count,
                                     strict=True)
        ]  # fmt: skip
        sending = {message.kind for message in cut.messages if not message.back}
        self.full = np.array([
            kind in sending or any(map(_freed, block.storages))
            for kind, block in enumerate(kinds.samples)
        ])  # fmt: skip
        self._gradients = np.array(
            [
                float(sum(w.gradient // cut.weight(w) for w in (*b.own, *b.tied)))
                for b in kinds.samples
            ]
        )
        self._sent = self._count_collectives()

    def _count_collectives(self) -> dict[tuple[str, str, Size, Axis], Row]:
        """Count each distinct collective: [forward, backward, selective][kind]."""
        remade = {node for chosen in self.again for node in chosen.ops}
        found: dict[tuple[str, str, Size, Axis], Row] = {}
        for message in self.cut.messages:
            key = (message.source, message.target, message.size, message.axis)
            times = found.setdefault(key, np.zeros((3, self._count)))
            times[1 if message.back else 0, message.kind] += 1
            if not message.back and message.node in remade and message.giver in remade:
                times[2, message.kind] += 1
        return found

    def seconds(self, sizes: Sizes, device: Device, *, accumulate: bool) -> BlockTimes:
        """Return the times on one device. accumulate: gradients are added over microbatches.

        Accumulation reads twice and writes once. Full recomputation repeats the whole forward, the
        selective mode its ops.
        """
        ahead, back = self.prices.seconds(self._numbers, sizes, device)
        forward, backward = self._by_kind(ahead), self._by_kind(back)
        own = NonOpCosts.of(self.prices.model, device)
        backward = backward + self._gradients * own.gradient(accumulate)
        selective = np.array([sum(float(ahead[n]) for n in row) for row in self._remade])
        none = np.zeros(self._count)
        return BlockTimes(
            forward,
            backward,
            {
                "none": none,
                "selective": selective if self.again else none,
                "full": np.where(self.full, forward, 0.0),
            },
        )

    def messages(self, sizes: Sizes, rings: Mapping[Axis, tuple[Link, ...]]) -> BlockTimes:
        """Return the times of collectives of tensor and expert parallelism over rings of ranks."""
        total = np.zeros((3, self._count))
        for (source, target, size, axis), times in self._sent.items():
            amount = float(sizes.number(size))
            cost = self.prices.model.reshard(source, target, amount, rings[axis])
            self.prices.sources.add(cost.source)
            total += cost.seconds * times
        forward, backward, selective = total
        none, full = np.zeros(self._count), np.where(self.full, forward, 0.0)
        return BlockTimes(forward, backward, {"none": none, "selective": selective, "full": full})

    def forward_of(self, sizes: Sizes, device: Device) -> dict[fx.Node, float]:
        """Return the forward seconds of every op of the samples."""
        ahead, _ = self.prices.seconds(self._numbers, sizes, device)
        return {node: float(ahead[place]) for node, place in self._place.items()}

    def bytes(self, sizes: Sizes) -> BlockMemory:
        """Return the memory at one microbatch size."""
        peaks = self._workspace.bytes(sizes)
        kept: dict[Recompute, list[int]] = {"none": [], "selective": [], "full": []}
        live: dict[Recompute, list[int]] = {"none": [], "selective": [], "full": []}
        for kind, block in enumerate(self.samples.kinds.samples):
            whole, handed = self.count_saved_bytes(kind, sizes)
            freed = _total(self._freed[kind], sizes)
            peak = peaks[block.index]
            if not self.full[kind]:  # its outputs are inputs of recomputed blocks, so they stay
                handed = whole + sum(sizes.number(m.size) for m in block.made if not m.saved)
            rows: tuple[tuple[Recompute, int, int], ...] = (
                ("none", whole, peak),
                ("selective", whole - freed, peak + freed),
                ("full", handed, peak + (whole if self.full[kind] else 0)),
            )
            for mode, stays, lives in rows:
                kept[mode].append(stays)
                live[mode].append(lives)
        return BlockMemory(
            {mode: tuple(row) for mode, row in kept.items()},
            {mode: tuple(row) for mode, row in live.items()},
        )

    def count_saved_bytes(self, kind: int, sizes: Sizes) -> tuple[int, int]:
        """Bytes that a block keeps without recomputation, and with all of it made again."""
        block = self.samples.kinds.samples[kind]
        handed = sum(sizes.number(m.size) for m in block.made)
        read = sum(
            sizes.number(tensor_bytes(t))
            for i in block.inputs
            for t in self.samples.specs.tensors(i)
        )
        return _total(self._stored[kind], sizes), handed + read

    def _by_kind(self, seconds: Row) -> Row:
        total = np.zeros(self._count)
        np.add.at(total, self._kind, seconds)
        return total


def _total(sizes: Mapping[Size, int], at: Sizes) -> int:
    return sum(times * at.number(size) for size, times in sizes.items())


def _freed(storage: SavedStorage) -> bool:
    """Return whether recomputation of its block frees it: only this block uses it."""
    return storage.maker is not None and not storage.shared
