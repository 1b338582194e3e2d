"""A graph's tensors and their users, for the placement problem."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxpart.compiler.tensor_sizes import tensors
from fxpart.compiler.work_estimate import is_heavy
from fxpart.costmodels.tensor_sizes import tensor_bytes
from fxpart.passes.rules import layout, operands
from fxpart.passes.rules.sharding_rule import PARTS, ShardingRule
from fxpart.pricing.memory import crossing_nodes
from fxpart.pricing.placement_options import OpFamilies, SavedBytes
from fxpart.pricing.specs import Specs, annotation
from fxpart.pricing.variants import Sizes
from fxpart.sharding import Mesh, Shard

MANY = 8  # a value without gradient and with at least so many users stays replicated
MOST_PARTS = 8  # most equal parts of a fused dim


@dataclass(frozen=True)
class TensorValue:
    """One tensor: the node that makes it, and the index among the node's results."""

    node: fx.Node
    index: int = 0


@dataclass
class GraphDataflow:
    """A graph's tensors and their users.

    ops: calls that compute tensors, in order. sources: inputs and state with users. value: of each
    node that is one tensor. users: per value the (op, operand position) pairs. constant: ops that
    compute from state alone. shared: ops with many users of their result and no gradient. kept: per
    op the tensors that autograd saves. parts: per op the strategies that shard a fused dim.
    """

    ops: list[fx.Node] = field(default_factory=list)
    sources: list[fx.Node] = field(default_factory=list)
    value: dict[fx.Node, TensorValue] = field(default_factory=dict)
    users: dict[TensorValue, list[tuple[fx.Node, int]]] = field(default_factory=dict)
    constant: set[fx.Node] = field(default_factory=set)
    shared: set[fx.Node] = field(default_factory=set)
    kept: dict[fx.Node, tuple[SavedBytes, ...]] = field(default_factory=dict)
    parts: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    loss: TensorValue | None = None


def read_dataflow(
    graph: fx.Graph,
    specs: Specs,
    sizes: Sizes,
    in_flight: float = 1,
    inside: float | None = None,
) -> GraphDataflow:
    """Return which op makes and uses which tensor.

    in_flight: microbatches with saved tensors. inside: the same for tensors that only one block
    uses, where stages recompute these; by default equal.
    """
    flow = GraphDataflow()
    users: defaultdict[TensorValue, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if isinstance(node.meta.get("val"), torch.Tensor):
                flow.value[node] = TensorValue(node)
                flow.sources.append(node)
        elif node.op == "call_function":
            _call(node, flow, users)
        elif node.op == "output":
            first = node.args[0][0] if isinstance(node.args[0], tuple | list) else None
            if isinstance(first, fx.Node) and first in flow.value:
                flow.loss = flow.value[first]
    flow.users = dict(users)
    flow.sources = [node for node in flow.sources if TensorValue(node) in users]
    flow.shared = {
        value.node
        for value, found in flow.users.items()
        if len(found) >= MANY and not specs.requires_grad(value.node)
    }
    times = dict.fromkeys((node.name for node in graph.nodes), in_flight)
    if inside is not None:
        across = {root.name for _, root, _ in crossing_nodes(graph, specs)}
        calls = (node.name for node in graph.nodes if node.op == "call_function")
        times |= dict.fromkeys(("", *(name for name in calls if name not in across)), inside)
    _keep(flow, specs, sizes, {"": in_flight} | times)
    return flow


def _call(
    node: fx.Node, flow: GraphDataflow, users: defaultdict[TensorValue, list[tuple[fx.Node, int]]]
) -> None:
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(source, fx.Node):
        index, parts = node.args[1], source.meta.get("val")
        if isinstance(parts, tuple | list) and isinstance(index, int):
            if isinstance(node.meta.get("val"), torch.Tensor):
                before = parts[: index % len(parts)]
                flow.value[node] = TensorValue(source, sum(len(tensors(p)) for p in before))
            return
    if not tensors(node.meta.get("val")):
        return
    flow.ops.append(node)
    if isinstance(node.meta.get("val"), torch.Tensor):
        flow.value[node] = TensorValue(node)
    given = operands(node)
    for position, operand in enumerate(given):
        if operand in flow.value:
            users[flow.value[operand]].append((node, position))
    made = [flow.value[o].node for o in given if o in flow.value]
    if made and all(m.op == "get_attr" or m in flow.constant for m in made):
        flow.constant.add(node)


def _keep(flow: GraphDataflow, specs: Specs, sizes: Sizes, times: Mapping[str, float]) -> None:
    """Divide the bytes that autograd saves among the ops that save one storage.

    times: how often a storage exists at once, by the node that makes it; "" for others.
    """
    savers: defaultdict[int, int] = defaultdict(int)
    for node in flow.ops:
        for number in {saved.storage for saved in annotation(node).saved}:
            savers[number] += 1
    for node in flow.ops:
        found_by_storage: dict[int, SavedBytes] = {}
        for saved in annotation(node).saved:
            size = float(sizes.number(saved.size)) / savers[saved.storage]
            size *= times.get(saved.source, times[""])
            where = _match_tensor(node, saved.source, sizes.number(saved.size), specs, sizes)
            found_by_storage.setdefault(saved.storage, SavedBytes(size, where))
        if found_by_storage:
            flow.kept[node] = tuple(found_by_storage.values())


def _match_tensor(
    node: fx.Node, source: str, size: int, specs: Specs, sizes: Sizes
) -> tuple[str, int]:
    """Return the tensor of an op whose sharding a saved storage shares: by name, else by size."""
    given = operands(node)
    for position, operand in enumerate(given):
        if operand.name == source:
            return "operand", position
    results = list(enumerate(specs.tensors(node)))
    operand_tensors = [(i, t) for i, o in enumerate(given) for t in specs.tensors(o)]
    order = [("result", results), ("operand", operand_tensors)]
    if source and source != node.name:
        order.reverse()
    for what, described in order:
        for position, tensor in described:
            whole = sizes.number(tensor_bytes(tensor))
            if whole and any(size * k == whole or size == whole * k for k in (1, 2, 4, 8)):
                return what, position
    return "result", 0


def find_fused_strategies(flow: GraphDataflow, families: OpFamilies) -> None:
    """Find the strategies that shard a fused dim.

    ``"n/3"`` means that a later op shards each of 3 equal parts. From users to producers, through
    ops that preserve the sharding.
    """
    mesh = Mesh((("x", 2),))
    wanted: defaultdict[TensorValue, set[Shard]] = defaultdict(set)
    known: dict[tuple[int, frozenset[tuple[int, Shard]]], _FusedStrategies] = {}
    rules: dict[int, ShardingRule] = {}
    for node in reversed(flow.ops):
        rule = families.rule(node)
        if rule is None:
            continue
        rules[id(rule)] = rule
        requested = frozenset(
            (value.index, shard)
            for value in (TensorValue(node, i) for i in range(len(rule.results)))
            for shard in wanted.get(value, ())
        )
        if (id(rule), requested) not in known:
            known[id(rule), requested] = _fused(rule, requested, mesh)
        found = known[id(rule), requested]
        if found.names:
            flow.parts[node] = found.names
        given = operands(node)
        for position, shard in found.operands:
            if given[position] in flow.value:
                wanted[flow.value[given[position]]].add(shard)


@dataclass(frozen=True)
class _FusedStrategies:
    """Strategies with the requested results, and the operands of these and the plain strategies."""

    names: tuple[str, ...]
    operands: tuple[tuple[int, Shard], ...]


def _fused(
    rule: ShardingRule, requested: frozenset[tuple[int, Shard]], mesh: Mesh
) -> _FusedStrategies:
    names: list[str] = []
    for index, shard in sorted(requested, key=lambda a: (a[0], a[1].dim, a[1].outer)):
        if shard.dim >= len(rule.results[index]) or isinstance(shard.outer, str):
            continue
        for factor in rule.results[index][shard.dim]:
            for inner in range(2, shard.outer + 1):
                name = f"{factor}{PARTS}{inner}"
                made = layout(rule, (name,), mesh) if shard.outer % inner == 0 else None
                if made is not None and made.results[index][0] == shard and name not in names:
                    names.append(name)
    plain = tuple(f for f in rule.factors if f not in rule.whole)
    found: dict[tuple[int, Shard], None] = {}
    for name in (*plain, *names):
        made = layout(rule, (name,), mesh)
        for position, operand in enumerate(made.operands if made is not None else ()):
            place = operand[0]
            if not isinstance(place, Shard) or isinstance(place.outer, str):
                continue
            if 1 < place.outer <= MOST_PARTS:
                found[position, place] = None
    return _FusedStrategies(tuple(names), tuple(found))


def find_followed_operand(
    node: fx.Node, flow: GraphDataflow, user_counts: Mapping[TensorValue, int]
) -> int | None:
    """Return the operand whose strategy a light op follows: the only one from another op.

    carried: per value the number of ops that use it; one with several users is no leader. None
    where the op has its own strategy.
    """
    if is_heavy(node):
        return None
    found = []
    for position, operand in enumerate(operands(node)):
        value = flow.value.get(operand)
        if value is None:
            return None
        if value.node.op == "call_function" and value.node not in flow.shared:
            found.append((position, value))
    if len(found) != 1 or user_counts[found[0][1]] != 1 or found[0][1].node in flow.constant:
        return None
    return found[0][0]
