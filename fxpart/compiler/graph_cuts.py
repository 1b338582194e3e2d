"""Where a graph can be cut: the bytes that would cross, and the places that stay closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxpart.compiler.effects import state_roots, state_written
from fxpart.compiler.graph_edit import value
from fxpart.compiler.graph_verifier import is_size
from fxpart.compiler.tensor_sizes import format_size, tensors
from fxpart.compiler.work_estimate import nbytes


def operations(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that belong to blocks, in order: calls that are not pure size computations."""
    return [n for n in graph.nodes if n.op == "call_function" and not is_size(n)]


def crossing(ops: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """For the cut after each op: bytes of the values that cross, and how many are not contiguous.

    Bytes at the example inputs; the user's inputs and state do not count, since every stage has
    its own.
    """
    at = {n: i for i, n in enumerate(ops)}
    sizes = [0] * (len(ops) + 1)
    strided = [0] * (len(ops) + 1)
    for node, first in at.items():
        last = max((at[u] for u in node.users if u in at), default=first)
        if any(u.op == "output" for u in node.users) or last == first:
            last = max(last, first)
        held = value(node)
        size = nbytes(held)
        odd = sum(not _contiguous(t) for t in tensors(held))
        sizes[first] += size
        sizes[last] -= size
        strided[first] += odd
        strided[last] -= odd
    for row in (sizes, strided):
        for i in range(1, len(row)):
            row[i] += row[i - 1]
    return sizes[: len(ops)], strided[: len(ops)]


def _contiguous(tensor: torch.Tensor) -> bool:
    """Whether strides are those of a dense row-major tensor, compared as expressions."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if format_size(size) != "1" and format_size(stride) != format_size(expected):
            return False
        expected = expected * size
    return True


def closed_cuts(graph: fx.Graph, ops: Sequence[fx.Node]) -> set[int]:
    """The cuts (after op i) that must not be made.

    Inside: a list of tensors and its getitems; values whose shape or number depends on data;
    all uses of state that some op writes.
    """
    at = {n: i for i, n in enumerate(ops)}
    closed: set[int] = set()
    for first, last in _spans(graph, at):
        closed.update(range(first, last))
    return closed


def _spans(graph: fx.Graph, at: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Ranges of ops (first, last) that stay together."""
    for node in at:
        held = value(node)
        if not isinstance(held, torch.Tensor) or _depends_on_data(held):
            yield at[node], max((at[u] for u in _users(node, at)), default=at[node])
    roots = state_roots(graph)
    names = {name for group in state_written(graph).values() for name in group}
    touched: dict[str, list[int]] = {}
    for node in at:
        for source in node.all_input_nodes:
            for name in roots[source] & names:
                touched.setdefault(name, []).append(at[node])
    for places in touched.values():
        yield min(places), max(places)


def _users(node: fx.Node, at: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """The ops that use a value, directly or through size computations on it."""
    for user in node.users:
        if user in at:
            yield user
        elif user.op == "call_function":
            yield from _users(user, at)


def _depends_on_data(tensor: torch.Tensor) -> bool:
    """Whether a size of the tensor is known only when the program runs."""
    return any(isinstance(s, torch.SymInt) and not s.node.has_hint() for s in tensor.shape)
