"""Seconds and bytes of each kind of block at any microbatch size, under one tensor degree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import fx

from fxpart.costmodels.sizes import tensor_bytes
from fxpart.pricing.joint_kinds import Block, Kinds, Storage
from fxpart.pricing.joint_recompute import Again
from fxpart.pricing.memory import Workspace
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes

if TYPE_CHECKING:
    from fxpart.cluster import Device, Link
    from fxpart.costs import CostModel, OpSpec, Size, TensorSpec
    from fxpart.solver.joint.problem import Recompute
    from fxpart.solver.problem import Weight

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Message:
    """A collective of a block's ranks over ``size`` bytes in all. back: in the backward.

    giver, node: the op whose result it moves, and the one that takes it.
    """

    kind: int
    source: str
    target: str
    size: Size
    back: bool
    node: fx.Node | None = None
    giver: fx.Node | None = None


class Whole:
    """How one rank holds each block: all of it. Tensor degrees above one override what they cut."""

    parts: int = 1
    messages: tuple[Message, ...] = ()

    def op(self, node: fx.Node, spec: OpSpec) -> OpSpec:
        """The op on what the rank holds."""
        del node
        return spec

    def tensors(self, node: fx.Node, whole: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The node's tensors as the rank holds them."""
        del node
        return whole

    def storage(self, storage: Storage) -> Size:
        """Bytes that the rank keeps of a storage."""
        return storage.size

    def weight(self, weight: Weight) -> int:
        """Into how many parts a parameter is cut."""
        del weight
        return 1

    def waits(self, weight: Weight) -> bool:
        """Whether its gradient is a sum over the ranks that is made once a step."""
        del weight
        return False


class _CutSpecs(Specs):
    """Specs of what one rank holds of each value."""

    def __init__(self, specs: Specs, cut: Whole) -> None:
        super().__init__(())
        self._specs, self._cut = specs, cut

    def tensors(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        return self._cut.tensors(node, self._specs.tensors(node))

    def requires_grad(self, node: fx.Node) -> bool:
        return self._specs.requires_grad(node)


@dataclass(frozen=True)
class Seconds:
    """By kind: forward and backward of the ops, what is made again by mode, and collectives."""

    forward: Row
    backward: Row
    again: Mapping[Recompute, Row]


@dataclass(frozen=True)
class Bytes:
    """By kind and mode: kept for the backward, and live while the block runs."""

    activation: Mapping[Recompute, tuple[int, ...]]
    workspace: Mapping[Recompute, tuple[int, ...]]


@dataclass
class Sheet:
    """Kinds of blocks under one cut.

    again: by kind what the selective mode makes again. reference: at these sizes it is decided
    which kinds the mode "full" makes again: those that then keep less.
    """

    graph: fx.GraphModule
    kinds: Kinds
    specs: Specs
    model: CostModel
    cut: Whole
    reference: Sizes
    again: Sequence[Again] = ()
    sources: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Describe every op of the samples; equal ops are one."""
        self._ops: dict[OpSpec, int] = {}
        self._uses: list[tuple[int, int]] = []  # kind, number of the op
        self._number: dict[fx.Node, int] = {}
        for kind, block in enumerate(self.kinds.samples):
            for node in block.nodes:
                spec = self.specs.op(node)
                if spec is not None:
                    number = self._ops.setdefault(self.cut.op(node, spec), len(self._ops))
                    self._uses.append((kind, number))
                    self._number[node] = number
        only = {block.index for block in self.kinds.samples}
        specs = self.specs if self.cut.parts == 1 else _CutSpecs(self.specs, self.cut)
        self._workspace = Workspace(self.graph.graph, specs, len(self.kinds.of), only)
        self._remade = [
            [self._number[n] for n in chosen.ops if n in self._number] for chosen in self.again
        ]
        pairs = [self.kept(block, self.reference) for block in self.kinds.samples]
        self.full = np.array([handed < whole for whole, handed in pairs])
        self._gradients = np.array(
            [
                float(sum(w.gradient // self.cut.weight(w) for w in (*b.own, *b.tied)))
                for b in self.kinds.samples
            ]
        )

    def seconds(self, sizes: Sizes, device: Device, *, accumulate: bool) -> Seconds:
        """On one device. accumulate: gradients are summed over microbatches (read, read, written).

        Full recomputation runs the whole forward again, the selective one its ops.
        """
        costs = [
            [self.model.op(sizes.op(op), device, backward) for op in self._ops]
            for backward in (False, True)
        ]
        self.sources |= {cost.source for row in costs for cost in row}
        ahead, back = (np.array([c.seconds for c in row]) for row in costs)
        forward, backward = self._by_kind(ahead), self._by_kind(back)
        if accumulate:
            backward = backward + 3 * self._gradients / device.bandwidth
        selective = np.array([sum(float(ahead[n]) for n in row) for row in self._remade])
        none = np.zeros(len(self.kinds.samples))
        return Seconds(
            forward,
            backward,
            {
                "none": none,
                "selective": selective if self.again else none,
                "full": np.where(self.full, forward, 0.0),
            },
        )

    def messages(self, sizes: Sizes, ring: tuple[Link, ...]) -> Seconds:
        """The collectives of tensor parallelism over a ring of the block's ranks."""
        count = len(self.kinds.samples)
        forward, backward, selective = np.zeros(count), np.zeros(count), np.zeros(count)
        remade = {node for chosen in self.again for node in chosen.ops}
        for message in self.cut.messages:
            size = float(sizes.number(message.size))
            cost = self.model.reshard(message.source, message.target, size, ring)
            self.sources.add(cost.source)
            (backward if message.back else forward)[message.kind] += cost.seconds
            if not message.back and message.node in remade and message.giver in remade:
                selective[message.kind] += cost.seconds
        none = np.zeros(count)
        full = np.where(self.full, forward, 0.0)
        return Seconds(forward, backward, {"none": none, "selective": selective, "full": full})

    def forward_of(self, sizes: Sizes, device: Device) -> dict[fx.Node, float]:
        """Forward seconds of every op of the samples."""
        costs = [self.model.op(sizes.op(op), device, False).seconds for op in self._ops]
        return {node: costs[number] for node, number in self._number.items()}

    def bytes(self, sizes: Sizes) -> Bytes:
        """Memory at one microbatch size."""
        peaks = self._workspace.bytes(sizes)
        kept: dict[Recompute, list[int]] = {"none": [], "selective": [], "full": []}
        live: dict[Recompute, list[int]] = {"none": [], "selective": [], "full": []}
        for kind, block in enumerate(self.kinds.samples):
            whole, handed = self.kept(block, sizes)
            chosen = self.again[kind].dropped if self.again else frozenset()
            freed = sum(
                sizes.number(self.cut.storage(s)) for s in block.storages if s.number in chosen
            )
            peak = peaks[block.index]
            if not self.full[kind]:  # what others are made again from is kept, too
                handed = whole + sum(sizes.number(m.size) for m in block.made if not m.saved)
            rows: tuple[tuple[Recompute, int, int], ...] = (
                ("none", whole, peak),
                ("selective", whole - freed, peak + freed),
                ("full", handed, peak + (whole if self.full[kind] else 0)),
            )
            for mode, stays, lives in rows:
                kept[mode].append(stays)
                live[mode].append(lives)
        return Bytes(
            {mode: tuple(row) for mode, row in kept.items()},
            {mode: tuple(row) for mode, row in live.items()},
        )

    def kept(self, block: Block, sizes: Sizes) -> tuple[int, int]:
        """Bytes that a block keeps without recomputation, and with all of it made again."""
        whole = sum(sizes.number(self.cut.storage(s)) for s in block.storages)
        handed = sum(sizes.number(m.size) for m in block.made)
        read = sum(
            sizes.number(tensor_bytes(t)) for i in block.inputs for t in self.specs.tensors(i)
        )
        return whole, handed + read

    def _by_kind(self, seconds: Row) -> Row:
        total = np.zeros(len(self.kinds.samples))
        for kind, number in self._uses:
            total[kind] += seconds[number]
        return total
