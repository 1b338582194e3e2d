"""Memory of blocks: saved tensors, and transfers between blocks."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from fxpart.compiler.collective_calls import op_name, unwrap_seeded_call
from fxpart.compiler.duplicated_ops import find_duplicated_ops
from fxpart.compiler.effects import state_written
from fxpart.costmodels.memory_traffic import VIEWS
from fxpart.costmodels.tensor_sizes import is_floating, item_bytes, sum_sizes, tensor_bytes
from fxpart.plan.precision import wire_dtype
from fxpart.pricing.specs import Specs, annotation
from fxpart.solver.problem import BlockValue

if TYPE_CHECKING:
    from fxpart.costs import Size


def find_needed_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that the loss and writes to state need; a stage's program has only these.

    All nodes where the graph returns no loss.
    """
    (output,) = graph.find_nodes(op="output") or (None,)
    returned = output.args[0] if output is not None and output.args else None
    loss = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(loss, fx.Node):
        return frozenset(graph.nodes)
    todo, found = [loss, *state_written(graph)], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return frozenset(found)


def saved_storages(graph: fx.Graph, blocks: int) -> tuple[tuple[Size, ...], ...]:
    """Return by block the bytes of each storage that it makes and autograd saves.

    Whichever blocks save a storage, the stage of its maker stores it until the backward: as its own
    saved tensor, or as the result that it sent. Stages that received it count it as received. An
    input counts once, in the first block that saves it: all microbatches and stages of a process
    share one batch. So does the result of a duplicated op, which a stage computes if it uses it.
    """
    duplicated = find_duplicated_ops(graph)
    home = {n.name: annotation(n).block for n in graph.nodes if n not in duplicated}
    found: dict[int, tuple[Size, str, set[int]]] = {}
    alive = find_needed_nodes(graph)
    for node in graph.nodes:
        notes = annotation(node)
        if node in alive and notes.block is not None:
            for saved in notes.saved:
                entry = found.setdefault(saved.storage, (saved.size, saved.source, set()))
                entry[2].add(notes.block)
    rows: list[list[Size]] = [[] for _ in range(blocks)]
    for size, source, users in found.values():
        producer = home.get(source)
        if producer is not None:
            rows[producer].append(size)
        else:  # an input, the result of a duplicated op or an internal result of one op
            rows[min(users)].append(size)
    return tuple(map(tuple, rows))


def crossing_nodes(
    graph: fx.Graph, specs: Specs
) -> Iterator[tuple[fx.Node, fx.Node, tuple[int, ...]]]:
    """Yield nodes whose values later blocks use: the node, the owner of its memory, the blocks."""
    roots: dict[fx.Node, fx.Node] = {}
    alive = find_needed_nodes(graph)
    for node in graph.nodes:
        roots[node] = roots[unwrap_seeded_call(node)[1][0]] if is_view(node, roots) else node
        block = annotation(node).block
        if block is None or not specs.tensors(node):
            continue
        users = {annotation(user).block for user in node.users if user in alive}
        later = tuple(sorted(b for b in users if b is not None and b > block))
        if later:
            yield node, roots[node], later


def crossing(
    graph: fx.Graph, specs: Specs, transfer_dtype: str = ""
) -> tuple[tuple[BlockValue, ...], tuple[Size, ...]]:
    """Return the values that later blocks use, and their bytes when sent.

    Results of duplicated ops are not sent; each storage of theirs that ops save is one value.
    transfer_dtype: dtype in which float32 is sent, "" for no conversion; it is stored as float32
    anyway.
    """
    duplicated = find_duplicated_ops(graph)
    sources = {
        saved.source for node in find_needed_nodes(graph) for saved in annotation(node).saved
    }
    values: list[BlockValue] = []
    amounts: list[Size] = []
    for node, root, later in crossing_nodes(graph, specs):
        if node in duplicated:
            continue
        block, tensors = annotation(node).block, specs.tensors(node)
        assert block is not None, "crossing nodes are in blocks"
        gradient = annotation(node).requires_grad and any(is_floating(t.dtype) for t in tensors)
        saved = root.name in sources or root.op != "call_function"
        wire = [wire_dtype(t.dtype, transfer_dtype) for t in tensors]
        widened = max(
            item_bytes(t.dtype) // item_bytes(w) for t, w in zip(tensors, wire, strict=True)
        )
        values.append(BlockValue(
            producer=block, consumers=later, gradient=gradient, saved=saved, widened=widened,
        ))  # fmt: skip
        sent = [replace(t, dtype=w) for t, w in zip(tensors, wire, strict=True)]
        amounts.append(sum_sizes(map(tensor_bytes, sent)))
    for value, size in _find_duplicated_storages(graph, duplicated):
        values.append(value)
        amounts.append(size)
    for value in _find_evaluation_reads(graph, values):
        values.append(value)
        amounts.append(0)
    return tuple(values), tuple(amounts)


def _find_evaluation_reads(graph: fx.Graph, known: Sequence[BlockValue]) -> Iterator[BlockValue]:
    """Yield reads between blocks that training does not make, as values without a cost.

    Outputs that the loss does not need are computed in evaluation only, by the same stages: these
    must not run before the blocks that they read from.
    """
    covered = {(value.producer, block) for value in known for block in value.consumers}
    found: dict[int, set[int]] = {}
    for node in graph.nodes:
        block = annotation(node).block
        if block is None:
            continue
        for used in node.all_input_nodes:
            maker = annotation(used).block
            if maker is not None and maker < block and (maker, block) not in covered:
                found.setdefault(maker, set()).add(block)
    for maker, blocks in sorted(found.items()):
        yield BlockValue(
            producer=maker, consumers=tuple(sorted(blocks)), gradient=False, sent=False
        )


def _find_duplicated_storages(
    graph: fx.Graph, duplicated: Container[fx.Node]
) -> Iterator[tuple[BlockValue, Size]]:
    """Yield the storages of duplicated ops that later blocks save, and their bytes."""
    made = {node.name for node in graph.nodes if node in duplicated}
    found: dict[int, tuple[Size, set[int]]] = {}
    for node in find_needed_nodes(graph):
        block = annotation(node).block
        for saved in annotation(node).saved if block is not None else ():
            if saved.source in made and block is not None:
                entry = found.setdefault(saved.storage, (saved.size, set()))
                entry[1].add(block)
    for _, (size, savers) in sorted(found.items()):
        first, *later = sorted(savers)
        if later:
            yield (
                BlockValue(producer=first, consumers=tuple(later), gradient=False, sent=False),
                size,
            )


def is_view(node: fx.Node, known: Container[fx.Node]) -> bool:
    """Return whether the node's value shares the memory of its first argument."""
    if node.op != "call_function":
        return False
    target, args, _ = unwrap_seeded_call(node)
    view = target is operator.getitem or op_name(target).split(".")[1] in VIEWS
    return view and bool(args) and args[0] in known
