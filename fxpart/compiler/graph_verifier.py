"""Graph invariants that the verifier checks before and after every pass, by level."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxpart.compiler.collective_calls import parse_random_call
from fxpart.compiler.effects import (
    is_assert,
    is_random,
    list_written_nodes,
    op_of,
    packet_name,
    state_roots,
    state_written,
)
from fxpart.compiler.graph_edit import describe_node
from fxpart.compiler.node_annotation import (
    BLOCKS_KEY,
    KEY,
    LEVEL_KEY,
    NO_CUT_KEY,
    RNG_KEY,
    Level,
    NodeAnnotation,
)


def find_faults(module: fx.GraphModule, level: Level) -> list[str]:
    """Return all violations of the invariants of this level, one sentence with location each."""
    found = []
    try:
        module.graph.lint()
    except (RuntimeError, AttributeError, TypeError, ValueError) as cause:
        found.append(f"the graph is malformed: {cause}")
    reached = module.meta.get(LEVEL_KEY)
    if reached != level:
        found.append(f"the graph's level is {reached!r}, but it must be {level!r}")
    found.extend(_structure(module.graph))
    if level >= Level.ANNOTATED:
        found.extend(_prepared(module.graph))
        found.extend(_blocks(module))
    if level >= Level.ASSIGNED:
        found.extend(_stages(module.graph))
    return found


def _structure(graph: fx.Graph) -> Iterator[str]:
    """Check unique names, inputs first, one output, and an annotation and a value for each call."""
    names: set[str] = set()
    computed = False
    for node in graph.nodes:
        if node.name in names:
            yield f"{describe_node(node)}: its name is not unique"
        names.add(node.name)
        if node.op in ("call_module", "call_method"):
            yield f"{describe_node(node)}: a {node.op} is not allowed"
        if node.op == "call_function":
            computed = True
            if not isinstance(node.meta.get(KEY), NodeAnnotation):
                yield f"{describe_node(node)}: it has no annotation"
            if "val" not in node.meta:
                yield f"{describe_node(node)}: it has no value"
        if node.op == "placeholder" and computed:
            yield f"{describe_node(node)}: an input follows an operation"
    outputs = graph.find_nodes(op="output")
    if len(outputs) != 1 or not isinstance(outputs[0].args[0], (tuple, list)):
        yield "the graph must have exactly one output node, which returns a tuple"


def _prepared(graph: fx.Graph) -> Iterator[str]:
    """Check that no asserts, regions or unkeyed random ops remain; only state is written."""
    state = state_written(graph)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_assert(node):
            yield f"{describe_node(node)}: an assertion remains in the graph"
        if getattr(node.target, "namespace", "") == "higher_order":
            yield f"{describe_node(node)}: a region ({node.target}) remains in the graph"
        if parse_random_call(node) is None and is_random(node):
            yield f"{describe_node(node)}: a random operation has no key"
        if list_written_nodes(node) and node not in state:
            yield f"{describe_node(node)}: {op_of(node)} writes a value that is not state"
    yield from _keys(graph)


def _keys(graph: fx.Graph) -> Iterator[str]:
    """Check that random ops take the first placeholder as key and are numbered from 0."""
    first = next(iter(graph.find_nodes(op="placeholder")), None)
    if first is None or first.name != RNG_KEY:
        yield f"the first input must be {RNG_KEY}"
    numbered = [(n, found) for n in graph.nodes if (found := parse_random_call(n)) is not None]
    for expected, (node, (key, index, *_)) in enumerate(numbered):
        if key is not first:
            yield f"{describe_node(node)}: its key is not the input {RNG_KEY}"
        if index != expected or node.meta[KEY].random != expected:
            yield f"{describe_node(node)}: its random index must be {expected}"


def _blocks(module: fx.GraphModule) -> Iterator[str]:
    """Check that block numbers are consecutive, match the table, and do not split written state."""
    infos = module.meta.get(BLOCKS_KEY)
    if not isinstance(infos, tuple):
        yield "the graph has no block table"
        return
    last = -1
    of: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        known = node.meta.get(KEY)
        block = known.block if isinstance(known, NodeAnnotation) else None
        if node.op != "call_function":
            if block is not None:
                yield f"{describe_node(node)}: a {node.op} must not belong to a block"
            continue
        if block is None:
            if not is_size(node):
                yield f"{describe_node(node)}: it belongs to no block"
            continue
        if block not in (last, last + 1):
            yield f"{describe_node(node)}: block {block} follows block {last}"
        last = of[node] = block
    if last + 1 != len(infos):
        yield f"the graph uses {last + 1} blocks, but the table has {len(infos)}"
    closed = set(module.meta.get(NO_CUT_KEY, ()))
    for name, blocks in _touched(module.graph, of).items():
        for cut in range(min(blocks), max(blocks)):
            if cut not in closed:
                yield f"block {cut} ends between uses of the written state {name}"


def _touched(graph: fx.Graph, of: dict[fx.Node, int]) -> dict[str, set[int]]:
    """Map each written state to the blocks that read or write it."""
    names = {name for group in state_written(graph).values() for name in group}
    roots = state_roots(graph)
    result: dict[str, set[int]] = {}
    for node in of:
        for source in node.all_input_nodes:
            for name in roots[source] & names:
                result.setdefault(name, set()).add(of[node])
    return result


def is_size(node: fx.Node) -> bool:
    """Return whether a node computes only sizes: its value is a number, not a tensor."""
    known = node.meta.get("val")
    if not isinstance(known, (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float)):
        return False
    name = packet_name(node.target)
    return not name or name.startswith("aten.sym_")


def _stages(graph: fx.Graph) -> Iterator[str]:
    """Check one stage per block, and that no op precedes its operands in stage order."""
    stage_of: dict[int, int | None] = {}
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        known = node.meta.get(KEY)
        if not isinstance(known, NodeAnnotation) or known.block is None:
            continue
        if known.stage is None:
            yield f"{describe_node(node)}: it has no stage"
            continue
        stages[node] = known.stage
        if stage_of.setdefault(known.block, known.stage) != known.stage:
            yield f"{describe_node(node)}: block {known.block} is on two stages"
        last = max((stages[a] for a in node.all_input_nodes if a in stages), default=0)
        if known.stage < last:
            yield f"{describe_node(node)}: stage {known.stage} follows stage {last}"
