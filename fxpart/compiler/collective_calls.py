"""Calls of :mod:`fxpart.collectives` in a rank-local graph: their arguments and side effects.

The communicator is the first argument at run time and is not part of the node's arguments. A
sharded op that needs communication is replaced by a function of :mod:`fxpart.collectives`; a random
op with a sharded result is replaced by ``random_shard``.
"""

from __future__ import annotations

from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fxpart import collectives
from fxpart.compiler.graph_edit import annotation
from fxpart.sharding import Mesh

RANDOM = "random_shard"  # random_shard(mesh, shape, placements, key, index, op, *args, **kwargs)
# Collectives that write batch-norm running statistics: position of the first of the two buffers.
WRITING = {"batch_norm_rows": 5}
# Ops that may change the dtype.
CASTS = frozenset({"to", "type_as", "_to_copy", "float", "half", "bfloat16"})
IDENTITIES = frozenset({"enter", "leave", "first_only", "slice_shard"})  # may alias the input
_RANDOM_FIRST = 2  # number of arguments before the key


@lru_cache(maxsize=4096)
def is_collective(target: Any) -> bool:
    """Return whether a call's target is a function of :mod:`fxpart.collectives`."""
    return isinstance(target, FunctionType) and (
        getattr(collectives, target.__name__, None) is target
    )


def is_random_shard(target: Any) -> bool:
    """Return whether the call draws this rank's shard of a random tensor."""
    return is_collective(target) and target.__name__ == RANDOM


def random_part(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key, index, op and op arguments from the arguments of ``random_shard``."""
    return args[_RANDOM_FIRST:]


def bind_fake_communicator(target: Any, mesh: Mesh, mesh_rank: int) -> Any:
    """Bind a collective to a fake communicator, which computes shapes only."""
    return partial(target, collectives.FakeCommunicator(mesh, mesh_rank))


def find_regathered(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """Return the gathers of trained parameters, and their casts, with what each is computed from.

    That is an earlier one of them, None for a parameter. The backward gathers such a value again
    instead of saving it (:mod:`fxpart.collectives.parameter_regather`).
    """
    found: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        given = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(given, fx.Node) or not annotation(node).requires_grad:
            continue
        if given in found and (_is_gather(node) or op_name(node.target).split(".")[1] in CASTS):
            found[node] = given
        elif is_parameter_gather(node):
            found[node] = None
    return found


def is_parameter_gather(node: fx.Node) -> bool:
    """Return whether the node gathers a trained parameter."""
    given = node.args[0] if _is_gather(node) and node.args else None
    return isinstance(given, fx.Node) and given.op == "get_attr" and annotation(node).requires_grad


def _is_gather(node: fx.Node) -> bool:
    return is_collective(node.target) and getattr(node.target, "__name__", "") == "all_gather"


def parse_random_call(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the key, index, op and op arguments of a random call; None for any other node."""
    from fxpart.rng import seeded

    if node.op != "call_function":
        return None
    if node.target is seeded:
        return tuple(node.args)
    return random_part(tuple(node.args)) if is_random_shard(node.target) else None


def unwrap_seeded_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of a node, without the seeding of a random op."""
    found = parse_random_call(node)
    if found is not None and len(found) >= 3:
        return found[2], found[3:], node.kwargs
    return node.target, node.args, node.kwargs


def op_name(target: object) -> str:
    """ "aten.addmm.default" for ATen's ops; a Python function counts as the ATen op of its name."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"aten.{getattr(target, '__name__', str(target))}"
