"""Calls of :mod:`fxpart.collectives` in a local graph: what they leave out, and what they hide.

The communicator comes first when they run and is not among a node's arguments. Forms stand for an
op whose cut needs other lanes, ``random_shard`` for a random op whose result is cut.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from torch import fx

from fxpart import collectives
from fxpart.sharding import Mesh

RANDOM = "random_shard"  # random_shard(mesh, shape, placements, key, index, op, *args, **kwargs)
# Forms that write the running statistics of a batch norm: where the first of the two stands.
WRITING = {"batch_norm_rows": 5}
IDENTITIES = frozenset({"enter", "leave", "first_only", "slice_shard"})  # may share the storage
_RANDOM_FIRST = 2  # arguments before the key


def is_collective(target: Any) -> bool:
    """Whether a call's target is a function of :mod:`fxpart.collectives`."""
    if isinstance(target, (str, ModuleType)) or not callable(target):
        return False
    name = getattr(target, "__name__", "")
    return bool(name) and getattr(collectives, name, None) is target


def is_random_shard(target: Any) -> bool:
    """Whether the call draws a lane's part of random numbers."""
    return is_collective(target) and target.__name__ == RANDOM


def random_part(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key, the index, the op and its arguments, out of those of ``random_shard``."""
    return args[_RANDOM_FIRST:]


def bind_fake_communicator(target: Any, mesh: Mesh, lane: int) -> Any:
    """A collective with a communicator of its own, for which shapes alone matter."""
    return partial(target, collectives.FakeCommunicator(mesh, lane))


def parse_random_call(node: fx.Node) -> tuple[Any, ...] | None:
    """The key, the index, the op and its arguments of a random call; None for any other node."""
    from fxpart.rng import seeded

    if node.op != "call_function":
        return None
    if node.target is seeded:
        return tuple(node.args)
    return random_part(tuple(node.args)) if is_random_shard(node.target) else None
