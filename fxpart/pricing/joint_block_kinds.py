"""Blocks with equal costs, found once: outputs, saved tensors, parameters and inputs of each."""

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
    """A storage that autograd saves. maker: the op of this block that makes it, None for an input.

    savers: the ops that save it, of any block. shared: whether later blocks use it, too.
    """

    size: Size
    number: int
    maker: fx.Node | None
    savers: tuple[fx.Node, ...]
    shared: bool


@dataclass(frozen=True)
class BlockOutput:
    """A value of this block that later blocks use: its bytes, and whether autograd saves it."""

    node: fx.Node
    size: Size
    saved: bool


@dataclass(frozen=True)
class BlockKind:
    """One block of a kind, which represents all of its kind.

    received: inputs from other blocks that are resident for its backward. inputs: the user's inputs
    that it reads. own: parameters and buffers of this block alone; tied: those that other blocks
    use, too; first: those of ``tied`` whose first block this is.
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
    """of: the kind of every block; samples: the first block of each kind."""

    of: tuple[int, ...]
    samples: tuple[BlockKind, ...]


def find_kinds(graph: fx.GraphModule, specs: Specs, weights: Sequence[Weight]) -> BlockKinds:
    """Group blocks by ops, arguments, shapes, dtypes, gradients, parameters and saved values.

    Two blocks of one kind also output values of equal sizes from equal ops, so that the costs of
    one are those of the other at every microbatch size.
    """
    infos = graph.meta[BLOCKS_KEY]
    found: dict[object, int] = {}
    samples: list[BlockKind] = []
    of = []
    for index, block in enumerate(list_blocks(graph.graph, specs, weights, len(infos))):
        key = (infos[index].identity, _signature(block))
        if key not in found:
            found[key] = len(samples)
            samples.append(block)
        of.append(found[key])
    return BlockKinds(tuple(of), tuple(samples))


def list_blocks(
    graph: fx.Graph, specs: Specs, weights: Sequence[Weight], count: int
) -> list[BlockKind]:
    """Return every block, each as a kind of its own. count: number of blocks."""
    nodes: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in graph.nodes:
        block = annotation(node).block
        if block is not None:
            nodes[block].append(node)
    made, received = _find_outputs(graph, specs, count), _find_inputs(graph, specs)
    shared = {m.node.name for row in made for m in row}
    storages = _storages(graph, count, shared)
    weights_of: list[list[Weight]] = [[] for _ in range(count)]
    for weight in weights:
        for block in weight.blocks:
            weights_of[block].append(weight)
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
            own=tuple(w for w in weights_of[b] if len(w.blocks) == 1),
            tied=tuple(w for w in weights_of[b] if len(w.blocks) > 1),
            first=tuple(w for w in weights_of[b] if len(w.blocks) > 1 and w.blocks[0] == b),
        )
        for b in range(count)
    ]  # fmt: skip


def _find_outputs(graph: fx.Graph, specs: Specs, count: int) -> list[list[BlockOutput]]:
    """Return by block its storages that later blocks use, each once."""
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


def _find_inputs(graph: fx.Graph, specs: Specs) -> defaultdict[int, list[fx.Node]]:
    """Return by block the values of earlier blocks that autograd keeps resident."""
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
    """Return by block the storages that it makes and autograd saves (as ``saved_storages``)."""
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
        private = savers[0] if not source else None  # internal to one op: a mask, a log-sum-exp
        block = min(map(_block, savers))
        own = tuple(saver for saver in savers if _block(saver) == block)
        rows[block].append(SavedStorage(size, number, private, own, False))
    return rows


def _block(node: fx.Node) -> int:
    block = annotation(node).block
    assert block is not None, "nodes are collected by block"
    return block


def _signature(block: BlockKind) -> object:
    """Return everything but the ops themselves, with nodes as positions in the block."""
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
