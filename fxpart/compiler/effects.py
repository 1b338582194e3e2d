"""Side effects of ops: which arguments they write and whether they draw random numbers.

The answers come from torch's op schemas and tags. Tables in this module list the few ops whose
schema hides an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpart.compat import operation_schema
from fxpart.compiler.collective_calls import (
    IDENTITIES,
    WRITING,
    is_collective,
    is_random_shard,
    random_part,
)
from fxpart.rng import seeded

# Ops whose schema does not declare that they write running statistics: the positions of the written
# arguments, and the name of the flag that enables the update.
# written arguments, and the name of the flag that switches the writing on.
_STATISTICS = {
    "aten.batch_norm": ((3, 4), "training"),
    "aten._batch_norm_impl_index": ((3, 4), "training"),
    "aten.native_batch_norm": ((3, 4), "training"),
    "aten.cudnn_batch_norm": ((3, 4), "training"),
    "aten.miopen_batch_norm": ((3, 4), "training"),
    "aten.instance_norm": ((3, 4), "use_input_stats"),
}

# Ops that draw no random numbers if one of these arguments is false or zero.
_SWITCHES = {
    "aten.dropout": ("p", "train"),
    "aten.feature_dropout": ("p", "train"),
    "aten.alpha_dropout": ("p", "train"),
    "aten.feature_alpha_dropout": ("p", "train"),
    "aten.native_dropout": ("p", "train"),
    "aten._fused_dropout": (),
    "aten.rrelu": ("training",),
    "aten.rrelu_with_noise": ("training",),
    "aten.rrelu_with_noise_functional": ("training",),
    "aten.lstm": ("dropout", "train"),
    "aten.gru": ("dropout", "train"),
    "aten.rnn_tanh": ("dropout", "train"),
    "aten.rnn_relu": ("dropout", "train"),
    "aten.scaled_dot_product_attention": ("dropout_p",),
    "aten._scaled_dot_product_flash_attention": ("dropout_p",),
    "aten._scaled_dot_product_flash_attention_for_cpu": ("dropout_p",),
    "aten._scaled_dot_product_efficient_attention": ("dropout_p",),
    "aten._scaled_dot_product_cudnn_attention": ("dropout_p",),
    "aten._flash_attention_forward": ("dropout_p",),
    "aten._efficient_attention_forward": ("dropout_p",),
    "aten.multi_head_attention_forward": ("dropout_p",),
}

_ASSERTS = frozenset(
    {
        "aten._assert_tensor_metadata",
        "aten._assert_scalar",
        "aten._assert_async",
        "aten._functional_assert_scalar",
        "aten._functional_assert_async",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
        "aten._functional_sym_constrain_range",
        "aten._functional_sym_constrain_range_for_size",
    }
)


def op_of(node: fx.Node) -> Any:
    """Return the callable that a node runs; for a random call with a key, the underlying op."""
    if node.target is seeded or is_random_shard(node.target):
        return _keyed(node)[2]
    return node.target


def op_args(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of :func:`op_of`."""
    if node.target is seeded or is_random_shard(node.target):
        return tuple(_keyed(node)[3:])
    return tuple(node.args)


def _keyed(node: fx.Node) -> tuple[Any, ...]:
    args = tuple(node.args)
    return random_part(args) if is_random_shard(node.target) else args


@lru_cache(maxsize=4096)
def packet_name(target: Any) -> str:
    """Return the op name without its overload, such as "aten.add"; "" if it is not a torch op."""
    schema = operation_schema(target)
    return "" if schema is None else str(schema.name).replace("::", ".")


def is_op(target: Any) -> bool:
    """Return whether the target is an op overload with a schema."""
    return operation_schema(target) is not None


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return the value of schema argument ``name``, by position, keyword or schema default."""
    target, args = op_of(node), op_args(node)
    for position, declared in enumerate(operation_schema(target).arguments):
        if declared.name == name:
            if position < len(args):
                return args[position]
            if name in node.kwargs:
                return node.kwargs[name]
            return declared.default_value if declared.has_default_value() else default
    return default


def is_assert(node: fx.Node) -> bool:
    """Return whether a node only asserts a condition that capture has already checked."""
    return node.op == "call_function" and packet_name(node.target) in _ASSERTS


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, by torch's tag and its enabling arguments."""
    if node.op != "call_function":
        return False
    target = op_of(node)
    name = packet_name(target)
    if not name:
        return False
    if name not in _SWITCHES:
        return torch.Tag.nondeterministic_seeded in target.tags
    return all(_on(argument(node, switch)) for switch in _SWITCHES[name])


def _on(value: Any) -> bool:
    """Return whether an enabling argument is true; symbolic or missing values count as true."""
    return not (isinstance(value, (bool, int, float)) and not value)


def list_written_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes whose storage this node writes, by schema or as running statistics."""
    if node.op != "call_function" or not _may_write(node.target):
        return ()
    target, args = op_of(node), op_args(node)
    if is_collective(target):
        first = WRITING.get(target.__name__)
        return () if first is None else tuple(tensors_in(args[first : first + 2]))
    if not is_op(target):
        return ()
    found: list[fx.Node] = []
    for position, name in _list_written_arguments(target):
        found.extend(tensors_in(args[position] if position < len(args) else node.kwargs.get(name)))
    table = _STATISTICS.get(packet_name(target))
    if table is not None and _on(argument(node, table[1])):
        for position in table[0]:
            found.extend(tensors_in(args[position] if position < len(args) else None))
    return tuple(found)


@lru_cache(maxsize=4096)
def _may_write(target: Any) -> bool:
    """Return whether a call may write an argument; True where its arguments say which op runs."""
    if target is seeded or is_collective(target):
        return True
    return is_op(target) and bool(
        _list_written_arguments(target) or packet_name(target) in _STATISTICS
    )


@lru_cache(maxsize=4096)
def _list_written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an op writes, by its schema."""
    return tuple(
        (position, declared.name)
        for position, declared in enumerate(operation_schema(target).arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    )


def tensors_in(value: Any) -> Iterator[fx.Node]:
    """Yield the nodes in an argument, through lists, tuples and dicts."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def views(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the argument nodes whose storage the result may alias, by schema."""
    if node.op != "call_function":
        return ()
    target = op_of(node)
    if is_collective(target):
        return tuple(tensors_in(node.args[0])) if target.__name__ in IDENTITIES else ()
    if not is_op(target):
        # getitem selects a tensor from the list that an op returned.
        return tuple(n for n in node.args if isinstance(n, fx.Node))
    positions = _list_aliased_arguments(target)
    if not positions:
        return ()
    args = op_args(node)
    return tuple(n for i in positions if i < len(args) for n in tensors_in(args[i]))


@lru_cache(maxsize=4096)
def _list_aliased_arguments(target: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an op's results may alias, by its schema."""
    schema = operation_schema(target)
    unknown = torch.Tag.maybe_aliasing_or_mutating in target.tags
    if not unknown and not any(r.alias_info is not None for r in schema.returns):
        return ()
    return tuple(
        position
        for position, declared in enumerate(schema.arguments)
        if unknown or declared.alias_info is not None
    )


def view_chain(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the node, the node it is a view of, and so on to the owner of the storage."""
    yield node
    while sources := views(node):
        node = sources[0]
        yield node


def state_written(graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """Map each node that writes state to the names of that state, through views."""
    writes = {node: found for node in graph.nodes if (found := list_written_nodes(node))}
    if not writes:
        return {}
    roots = state_roots(graph)
    return {
        node: names
        for node, written in writes.items()
        if (names := tuple(sorted({name for n in written for name in roots[n]})))
    }


def state_roots(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Map each node to the names of the state whose storage its value may alias."""
    roots: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            roots[node] = frozenset({str(node.target)})
        else:
            roots[node] = frozenset().union(*(roots[n] for n in views(node)))
    return roots


def write_state_early(graph: fx.Graph) -> None:
    """Move each ``copy_`` to state, and what only it reads, behind the last op it must follow.

    Buffers that forward assigns anew are copied at the end of a graph, and between uses of written
    state a graph cannot be cut. The graph has no other in-place ops.
    """
    roots, written = state_roots(graph), state_written(graph)
    for writer, (name, *others) in written.items():
        source = writer.args[1] if packet_name(writer.target) == "aten.copy_" else None
        if others or writer.users or not isinstance(source, fx.Node) or roots[source]:
            continue
        moved, places = {writer}, {node: place for place, node in enumerate(graph.nodes)}
        for node in reversed([*places][: places[writer]]):
            pure = node.op == "call_function" and not is_random(node) and not has_effect(node)
            if pure and node.users and moved.issuperset(node.users):
                moved.add(node)
        read = frozenset().union(*(roots[a] for n in moved for a in n.all_input_nodes))
        before = [
            n for n in places
            if n not in moved and (
                not moved.isdisjoint(n.users) or not read.isdisjoint(written.get(n, ()))
                or any(name in roots[a] for a in (n, *n.all_input_nodes))
            )
        ]  # fmt: skip
        last = max(before, key=places.__getitem__)
        if last.op == "call_function" and places[last] < places[writer]:
            for node in sorted(moved, key=places.__getitem__, reverse=True):
                last.append(node)


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must remain even without users."""
    return node.op in ("placeholder", "output") or bool(list_written_nodes(node))


def remove_dead_nodes(graph: fx.Graph) -> int:
    """Remove every node without users and side effects; return the number removed."""
    count = 0
    for node in reversed(graph.nodes):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
            count += 1
    return count
