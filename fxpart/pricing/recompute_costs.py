"""Costs of stages that recompute their activations.

They follow the runtime (:mod:`fxpart.runtime.executor.recompute`), which recomputes block by block
just before the block's backward. full: a block stores its outputs for other blocks and the user's
inputs that it reads; its whole forward runs again, with its collectives. selective: the results of
long products are stored too, and these products do not run again (Korthikanti et al. 2022, section
5). A block of which autograd saves nothing else is not recomputed, unless it has collectives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, prod
from typing import Literal, Protocol, cast

from torch import fx

from fxpart.costmodels.contractions import flops
from fxpart.costmodels.op_classes import op_class
from fxpart.costmodels.tensor_sizes import item_bytes, tensor_bytes
from fxpart.costs import OpSpec
from fxpart.pricing.joint_block_kinds import BlockKind, BlockOutput, SavedStorage, list_blocks
from fxpart.pricing.specs import Specs
from fxpart.pricing.variants import Sizes
from fxpart.pricing.workspace import Workspace
from fxpart.solver.problem import Recomputation

# The selective mode stores a product that would free, per operation, less than this many times the
# bytes that full recomputation frees per operation of the block; as the runtime decides.
WORTH = 2.0
_PRODUCTS = {"matmul", "convolution", "attention"}
_SCORE_BYTES = 4  # Attention with dropout computes in float32 at least.
_MODES: tuple[Literal["selective", "full"], ...] = ("selective", "full")


class BlockSizes(Protocol):
    """Sizes of one rank's part of a block, at one microbatch size."""

    def storage(self, storage: SavedStorage) -> int:
        """Return the bytes of a saved storage."""

    def output(self, output: BlockOutput) -> int:
        """Return the bytes of a value that later blocks use."""

    def result(self, node: fx.Node) -> int:
        """Return the bytes of an op's results, or of an input."""

    def op(self, node: fx.Node) -> OpSpec:
        """Return an op, with numbers as sizes."""


@dataclass(frozen=True)
class RecomputedBlock:
    """A block of a stage that recomputes: ops and bytes that it stores per microbatch.

    tensors: until its backward. products: until the op runs again, for the selective mode. skipped:
    ops that do not run again. again: whether others do.
    """

    tensors: tuple[tuple[fx.Node, int], ...]
    products: tuple[tuple[fx.Node, int], ...] = ()
    skipped: tuple[fx.Node, ...] = ()
    again: bool = True

    @property
    def stored(self) -> int:
        """Return the bytes that it stores per microbatch."""
        return sum(size for _, size in (*self.tensors, *self.products))


def is_freed(storage: SavedStorage) -> bool:
    """Return whether recomputation of its block frees the storage: only this block uses it."""
    return storage.maker is not None and not storage.shared


def is_product(op: OpSpec) -> bool:
    """Return whether the runtime may store the op's result in the selective mode."""
    return op_class(op) in _PRODUCTS


def recompute_block(
    block: BlockKind, inputs: Sequence[fx.Node], products: Sequence[fx.Node], size: BlockSizes
) -> dict[str, RecomputedBlock]:
    """Return a block by mode. inputs: the user's inputs that it stores."""
    made = {one.node for one in block.made}
    handed = [(one.node, size.output(one)) for one in block.made]
    handed += [(node, size.result(node)) for node in inputs]
    freed = sum(size.storage(one) for one in block.storages if is_freed(one))
    parts = {node: _list_parts(size.op(node), size.result(node)) for node in products}
    total = sum(work for row in parts.values() for work, _ in row) or 1.0
    stored, skipped = list[tuple[fx.Node, int]](), list[fx.Node]()
    for node, row in parts.items():
        worth = [bytes_ / max(work, 1.0) < WORTH * freed / total for work, bytes_ in row]
        kept = [(node, bytes_) for (_, bytes_), keep in zip(row, worth, strict=True) if keep]
        stored += kept[:-1] if worth[-1] and node in made else kept
        skipped += [node] * all(worth)
    return {
        "selective": RecomputedBlock(tuple(handed), tuple(stored), tuple(skipped)),
        "full": RecomputedBlock(tuple(handed)),
    }


def _list_parts(op: OpSpec, result: int) -> list[tuple[float, int]]:
    """Return the operations and the bytes of the results of an op's products; the last is the op's.

    Attention with dropout is two products to the runtime: the scores, and the weighted values.
    """
    work = float(flops(op))
    if op.key != "scaled_dot_product_attention" or not op.attribute("dropout_p", "4"):
        return [(work, result)]
    query, key, value = op.inputs[:3]
    pairs = prod(cast(tuple[int, ...], query.shape[:-1])) * cast(int, key.shape[-2])
    scores = 2.0 * pairs * cast(int, query.shape[-1])
    return [
        (scores, pairs * max(_SCORE_BYTES, item_bytes(query.dtype))),
        (2.0 * pairs * cast(int, value.shape[-1]), result),
    ]


def store_block(block: BlockKind, size: BlockSizes) -> RecomputedBlock:
    """Return the bytes of a block that is not recomputed in a stage that recomputes.

    Its outputs are inputs of recomputed blocks, so they are stored, too.
    """
    saved = [(one.maker or one.savers[0], size.storage(one)) for one in block.storages]
    saved += [(m.node, size.output(m)) for m in block.made if not m.saved]
    return RecomputedBlock(tuple(saved), again=False)


@dataclass(frozen=True)
class BlockForward:
    """Forward seconds of one block: of each op, and of its collectives with their packing."""

    ops: Mapping[fx.Node, float]
    collectives: float

    def again(self, skipped: Container[fx.Node]) -> float:
        """Return the seconds that recomputation adds, without the skipped ops."""
        return fsum((self.collectives, *(s for n, s in self.ops.items() if n not in skipped)))


@dataclass(frozen=True)
class _GraphSizes:
    """Sizes of a rank's own graph."""

    specs: Specs
    sizes: Sizes

    def storage(self, storage: SavedStorage) -> int:
        return self.sizes.number(storage.size)

    def output(self, output: BlockOutput) -> int:
        return self.sizes.number(output.size)

    def result(self, node: fx.Node) -> int:
        return sum(self.sizes.number(tensor_bytes(one)) for one in self.specs.tensors(node))

    def op(self, node: fx.Node) -> OpSpec:
        op = self.specs.op(node)
        assert op is not None, "products have a spec"
        return self.sizes.op(op)


class RecomputeCosts:
    """Costs of recomputation by block of one rank's graph; sizes stay symbolic."""

    def __init__(
        self, graph: fx.GraphModule, specs: Specs, blocks: int, sending: Iterable[int]
    ) -> None:
        """graph: with saved tensors. sending: the blocks with collectives."""
        self._specs = specs
        self._blocks = list_blocks(graph.graph, specs, (), blocks)
        sends = set(sending)
        self._again = [
            block.index in sends or any(map(is_freed, block.storages)) for block in self._blocks
        ]
        self._inputs = _first_reads(self._blocks)

    @cached_property
    def products(self) -> list[list[fx.Node]]:
        """Return by block the products that run again unless they are stored."""
        ops = [[(node, self._specs.op(node)) for node in block.nodes] for block in self._blocks]
        return [[node for node, op in row if op is not None and is_product(op)] for row in ops]

    def blocks_at(self, sizes: Sizes) -> list[dict[str, RecomputedBlock]]:
        """Return what each block stores and runs again, by mode."""
        size = _GraphSizes(self._specs, sizes)
        return [
            recompute_block(block, inputs, products, size)
            if again
            else dict.fromkeys(_MODES, store_block(block, size))
            for block, inputs, products, again in zip(
                self._blocks, self._inputs, self.products, self._again, strict=True
            )
        ]

    def price(
        self,
        sizes: Sizes,
        forward: Sequence[Sequence[BlockForward]],
        collective: Sequence[float],
        workspace: Workspace,
        packed: int,
    ) -> tuple[Recomputation, ...]:
        """Return the costs of both modes.

        forward: [device type][block]. collective: forward seconds of collectives, [block], empty
        without any. packed: bytes of packed gradients, part of each workspace.
        """
        each = self.blocks_at(sizes)
        return tuple(
            Recomputation(
                mode=mode,
                seconds=tuple(
                    tuple(
                        one.again(block[mode].skipped) if again else 0.0
                        for one, block, again in zip(row, each, self._again, strict=True)
                    )
                    for row in forward
                ),
                activation=tuple(block[mode].stored for block in each),
                workspace=tuple(
                    packed + size
                    for size in workspace.bytes(
                        sizes,
                        {number for number, block in enumerate(each) if block[mode].again},
                        [one for block in each for one in block[mode].products],
                    )
                ),
                collective=tuple(collective),
            )
            for mode in _MODES
        )


def _first_reads(blocks: Sequence[BlockKind]) -> list[list[fx.Node]]:
    """Return by block the user's inputs that it is the first to read."""
    seen: set[fx.Node] = set()
    found = []
    for block in blocks:
        found.append([node for node in block.inputs if node not in seen])
        seen.update(block.inputs)
    return found
