"""Memory freed and ops repeated by recomputation, for one block of a kind.

full: a block saves its outputs for later blocks and the user's inputs that it reads; all other
tensors are recomputed by its whole forward, just before its backward. An output is counted once,
where it is made, and is the next block's input. A block of which autograd saves nothing else is not
recomputed, unless it has collectives.

selective: of the values that autograd saves, those are recomputed that free, per second of
recomputation, at least ``LEAST_GAIN`` times the bytes that full recomputation frees per second of
the block's forward. On accelerators these are the results of memory-bound ops (attention scores and
their softmax, activation functions, norms, dropout), not those of large matrix products
(Korthikanti et al. 2022, section 5). Values are considered in order, so that one may be recomputed
from another that is itself recomputed, but never from values of other blocks that are not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import fx

from fxpart.pricing.joint_block_kinds import BlockKind, SavedStorage
from fxpart.pricing.specs import tensors_of

LEAST_GAIN = 2.0


@dataclass(frozen=True)
class BlockRecompute:
    """What is recomputed in one block: numbers of storages, and the ops that make them."""

    dropped: frozenset[int] = frozenset()
    ops: tuple[fx.Node, ...] = ()


def select_recomputed_ops(
    block: BlockKind, seconds: Callable[[fx.Node], float], freed: float, forward: float,
    bytes_of: Callable[[SavedStorage], int],
) -> BlockRecompute:  # fmt: skip
    """Select what the selective mode recomputes.

    seconds: of an op's forward. freed, forward: the bytes that full recomputation frees, and the
    seconds of the block's forward.
    """
    if freed <= 0 or forward <= 0:
        return BlockRecompute()
    order = {node: i for i, node in enumerate(block.nodes)}
    kept = {s.maker for s in block.storages if s.maker is not None}
    made = {m.node for m in block.made}
    dropped: set[int] = set()
    repeated: dict[fx.Node, None] = {}
    candidates = [s for s in block.storages if s.maker in order and not s.shared]
    for storage in sorted(candidates, key=lambda s: (order[_maker(s)], s.number)):
        maker = _maker(storage)
        if maker in made:
            continue
        ops = _closure(block, maker, order, kept - {maker}, repeated)
        cost = None if ops is None else sum(map(seconds, ops))
        if ops is None or cost is None or bytes_of(storage) < cost * LEAST_GAIN * freed / forward:
            continue
        dropped.add(storage.number)
        repeated.update(dict.fromkeys(ops))
        if all(s.number in dropped for s in block.storages if s.maker is maker):
            kept.discard(maker)
    ops_ = tuple(sorted(repeated, key=order.__getitem__))
    return BlockRecompute(frozenset(dropped), ops_)


def _maker(storage: SavedStorage) -> fx.Node:
    assert storage.maker is not None, "candidates have a maker"
    return storage.maker


def _closure(
    block: BlockKind,
    maker: fx.Node,
    order: Mapping[fx.Node, int],
    kept: Container[fx.Node],
    repeated: Container[fx.Node],
) -> list[fx.Node] | None:
    """Return the ops that make a value from saved ones; None where that is not possible."""
    found: dict[fx.Node, None] = {}
    waiting = [maker]
    while waiting:
        node = waiting.pop()
        if node in found or node in repeated:
            continue
        found[node] = None
        for operand in node.all_input_nodes:
            if operand in order:
                if operand not in kept:
                    waiting.append(operand)
            elif not _is_available(block, operand):
                return None
    return sorted(found, key=order.__getitem__)


def _is_available(block: BlockKind, node: fx.Node) -> bool:
    """Return whether a value from outside the block is available in its backward."""
    if node.op != "call_function" or node in block.received:
        return True
    return next(tensors_of(node.meta.get("val")), None) is None
