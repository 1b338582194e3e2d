"""Possible stage boundaries of a graph: bytes that cross each cut, and forbidden cuts."""

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
    """Return the nodes that belong to blocks, in order: calls other than size computations."""
    return [n for n in graph.nodes if n.op == "call_function" and not is_size(n)]


def crossing(ops: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """Return the bytes and the number of non-contiguous tensors that cross the cut after each op.

    Bytes are at the example inputs. Model inputs and state do not count because every stage has its
    own.
    """
    at = {n: i for i, n in enumerate(ops)}
    sizes = [0] * (len(ops) + 1)
    strided = [0] * (len(ops) + 1)
    for node, first in at.items():
        last = max((at[u] for u in node.users if u in at), default=first)
        if any(u.op == "output" for u in node.users) or last == first:
            last = max(last, first)
        result = value(node)
        size = nbytes(result)
        strided_count = sum(not _contiguous(t) for t in tensors(result))
        sizes[first] += size
        sizes[last] -= size
        strided[first] += strided_count
        strided[last] -= strided_count
    for row in (sizes, strided):
        for i in range(1, len(row)):
            row[i] += row[i - 1]
    return sizes[: len(ops)], strided[: len(ops)]


def _contiguous(tensor: torch.Tensor) -> bool:
    """Return whether strides are dense and row-major, compared as symbolic expressions."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if format_size(size) != "1" and format_size(stride) != format_size(expected):
            return False
        expected = expected * size
    return True


def closed_cuts(graph: fx.Graph, ops: Sequence[fx.Node]) -> set[int]:
    """Return the cuts (after op i) that are not allowed.

    A cut must not separate a list of tensors from its getitems, a value with data-dependent shape
    from its users, or two uses of state that some op writes.
    """
    at = {n: i for i, n in enumerate(ops)}
    closed: set[int] = set()
    for first, last in _spans(graph, at):
        closed.update(range(first, last))
    return closed


def _spans(graph: fx.Graph, at: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of ops (first, last) that must be in one stage."""
    for node in at:
        result = value(node)
        if not isinstance(result, torch.Tensor) or _depends_on_data(result):
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
    """Yield the ops that use a value, directly or through size computations."""
    for user in node.users:
        if user in at:
            yield user
        elif user.op == "call_function":
            yield from _users(user, at)


def _depends_on_data(tensor: torch.Tensor) -> bool:
    """Return whether a size of the tensor is known only at run time."""
    return any(isinstance(s, torch.SymInt) and not s.node.has_hint() for s in tensor.shape)
