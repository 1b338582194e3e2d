"""Blocks that cost the same, found once: what each makes, keeps, holds and hands on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from fxpart.compiler import BLOCKS_KEY
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.pricing.memory import crossing_nodes, find_needed_nodes
from fxpart.pricing.specs import Specs, annotation
from fxpart.solver.problem import Weight

if TYPE_CHECKING:
    from fxpart.costs import Size


@dataclass(frozen=True)
class SavedStorage:
    """A storage that autograd keeps. maker: the op of this block that makes it, None for an input.

    savers: the ops that keep it, of any block. shared: later blocks use it, too.
    """

    size: Size
    number: int
    maker: fx.Node | None
    savers: tuple[fx.Node, ...]
    shared: bool


@dataclass(frozen=True)
class BlockOutput:
    """A value of this block that later blocks use: its bytes, and whether autograd keeps it."""

    node: fx.Node
    size: Size
    saved: bool


@dataclass(frozen=True)
class BlockKind:
    """One block of a kind, standing for all of it.

    received: what it uses of other blocks and finds kept for its backward. inputs: the user's
    inputs that it reads. own: parameters and buffers of this block alone; tied: those that other
    blocks use, too; first: those of ``tied`` whose first block this is.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    storages: tuple[SavedStorage, ...]
    made: tuple[BlockOutput, ...]
    received: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...]
    own: tuple[Weight, ...]
    tied: tuple[Weight, ...]
    first: tuple[Weight, ...]


@dataclass(frozen=True)
class BlockKinds:
    """of: the kind of every block; samples: by kind its first block."""

    of: tuple[int, ...]
    samples: tuple[BlockKind, ...]


def find_kinds(graph: fx.GraphModule, specs: Specs, weights: Sequence[Weight]) -> BlockKinds:
    """Blocks of equal ops, arguments, shapes, dtypes, gradients, parameters and kept values.

    Two blocks of one kind hand on values of equal sizes from equal ops, too, so that whatever is
    priced for the one holds for the other at every microbatch size.
    """
    infos = graph.meta[BLOCKS_KEY]
    found: dict[object, int] = {}
    samples: list[BlockKind] = []
    of = []
    for index, block in enumerate(_blocks(graph.graph, specs, weights, len(infos))):
        key = (infos[index].identity, _signature(block))
        if key not in found:
            found[key] = len(samples)
            samples.append(block)
        of.append(found[key])
    return BlockKinds(tuple(of), tuple(samples))


def _blocks(
    graph: fx.Graph, specs: Specs, weights: Sequence[Weight], count: int
) -> list[BlockKind]:
    nodes: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in graph.nodes:
        block = annotation(node).block
        if block is not None:
            nodes[block].append(node)
    made, received = _made(graph, specs, count), _received(graph, specs)
    shared = {m.node.name for row in made for m in row}
    storages = _storages(graph, count, shared)
    held: list[list[Weight]] = [[] for _ in range(count)]
    for weight in weights:
        for block in weight.blocks:
            held[block].append(weight)
    return [
        BlockKind(
            index=b,
            nodes=tuple(nodes[b]),
            storages=tuple(storages[b]),
            made=tuple(made[b]),
            received=frozenset(received[b]),
            inputs=tuple(
                dict.fromkeys(
                    i for n in nodes[b] for i in n.all_input_nodes
                    if i.op == "placeholder" and specs.tensors(i)
                )
            ),
            own=tuple(w for w in held[b] if len(w.blocks) == 1),
            tied=tuple(w for w in held[b] if len(w.blocks) > 1),
            first=tuple(w for w in held[b] if len(w.blocks) > 1 and w.blocks[0] == b),
        )
        for b in range(count)
    ]  # fmt: skip


def _made(graph: fx.Graph, specs: Specs, count: int) -> list[list[BlockOutput]]:
    """By block the storages that it makes and later blocks use, each once."""
    sources = {
        saved.source for node in find_needed_nodes(graph) for saved in annotation(node).saved
    }
    found: dict[fx.Node, BlockOutput] = {}
    for _, root, _ in crossing_nodes(graph, specs):
        if root.op == "call_function" and root not in found:
            size: Size = 0
            for tensor in specs.tensors(root):
                size = size + tensor_bytes(tensor)
            found[root] = BlockOutput(root, size, root.name in sources)
    rows: list[list[BlockOutput]] = [[] for _ in range(count)]
    for root, made in found.items():
        block = annotation(root).block
        if block is not None:
            rows[block].append(made)
    return rows


def _received(graph: fx.Graph, specs: Specs) -> defaultdict[int, list[fx.Node]]:
    """By block the values of earlier blocks that are kept, because autograd keeps their memory."""
    sources = {
        saved.source for node in find_needed_nodes(graph) for saved in annotation(node).saved
    }
    found: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node, root, later in crossing_nodes(graph, specs):
        if root.op != "call_function" or root.name in sources:
            for block in later:
                found[block].append(node)
    return found


def _storages(graph: fx.Graph, count: int, shared: set[str]) -> list[list[SavedStorage]]:
    """By block what it makes and autograd keeps, as ``memory.saved_storages`` counts it."""
    nodes = {node.name: node for node in graph.nodes}
    found: dict[int, tuple[Size, str, list[fx.Node]]] = {}
    alive = find_needed_nodes(graph)
    for node in graph.nodes:
        if node in alive and annotation(node).block is not None:
            for saved in annotation(node).saved:
                entry = found.setdefault(saved.storage, (saved.size, saved.source, []))
                entry[2].append(node)
    rows: list[list[SavedStorage]] = [[] for _ in range(count)]
    for number, (size, source, savers) in found.items():
        maker = nodes.get(source)
        home = annotation(maker).block if maker is not None else None
        if home is not None:
            entry_ = SavedStorage(size, number, maker, tuple(savers), source in shared)
            rows[home].append(entry_)
            continue
        private = savers[0] if not source else None  # a mask, a log-sum-exp: one op's own
        block = min(map(_block, savers))
        own = tuple(saver for saver in savers if _block(saver) == block)
        rows[block].append(SavedStorage(size, number, private, own, False))
    return rows


def _block(node: fx.Node) -> int:
    block = annotation(node).block
    assert block is not None, "it was collected by its block"
    return block


def _signature(block: BlockKind) -> object:
    """All but the ops themselves, with nodes as places in the block."""
    at = {node: i for i, node in enumerate(block.nodes)}
    return (
        tuple(
            (str(s.size), at.get(s.maker, -1) if s.maker else -1, s.shared,
             tuple(at.get(n, -1) for n in s.savers if n in at))
            for s in block.storages
        ),
        tuple((at[m.node], str(m.size), m.saved) for m in block.made),
        tuple(sorted((w.weight, w.gradient, w.optimizer, w.buffer) for w in block.own)),
        tuple(sorted((w.gradient, w in block.first, w.optimizer) for w in block.tied)),
    )  # fmt: skip
