"""What recomputation frees and what it runs again, for one block of a kind.

full: a block keeps what it hands on to later blocks and the user's inputs that it reads; all else
is made again, by its whole forward, just before its backward. What a block hands on is counted
where it is made, once, and is the next block's input. A block of which autograd keeps nothing else
is not made again, unless it has collectives.

selective: of the values that autograd keeps, those are made again that free, for each second that
making them again takes, at least ``WORTH`` times the bytes that full recomputation frees for each
second of the block's forward. On accelerators these are the results of ops bound by memory
(attention scores and their softmax, activation functions, norms, dropout), not those of products
over long sums (Korthikanti et al. 2022, section 5). In order, so that a value may be made from one
that is itself made again; never from values of other blocks that nothing keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import fx

from fxpart.pricing.joint_block_kinds import BlockKind, SavedStorage
from fxpart.pricing.specs import tensors_of

WORTH = 2.0


@dataclass(frozen=True)
class BlockRecompute:
    """What is made again in one block: numbers of storages, and the ops that make them."""

    dropped: frozenset[int] = frozenset()
    ops: tuple[fx.Node, ...] = ()


def select_recomputed_ops(
    block: BlockKind, seconds: Callable[[fx.Node], float], freed: float, forward: float,
    bytes_of: Callable[[SavedStorage], int],
) -> BlockRecompute:  # fmt: skip
    """What the selective mode makes again.

    seconds: of an op's forward. freed, forward: the bytes that full recomputation frees, and the
    seconds of the block's forward.
    """
    if freed <= 0 or forward <= 0:
        return BlockRecompute()
    order = {node: i for i, node in enumerate(block.nodes)}
    kept = {s.maker for s in block.storages if s.maker is not None}
    made = {m.node for m in block.made}
    dropped: set[int] = set()
    again: dict[fx.Node, None] = {}
    candidates = [s for s in block.storages if s.maker in order and not s.shared]
    for storage in sorted(candidates, key=lambda s: (order[_maker(s)], s.number)):
        maker = _maker(storage)
        if maker in made:
            continue
        ops = _closure(block, maker, order, kept - {maker}, again)
        cost = None if ops is None else sum(map(seconds, ops))
        if ops is None or cost is None or bytes_of(storage) < cost * WORTH * freed / forward:
            continue
        dropped.add(storage.number)
        again.update(dict.fromkeys(ops))
        if all(s.number in dropped for s in block.storages if s.maker is maker):
            kept.discard(maker)
    ops_ = tuple(sorted(again, key=order.__getitem__))
    return BlockRecompute(frozenset(dropped), ops_)


def _maker(storage: SavedStorage) -> fx.Node:
    assert storage.maker is not None, "only those with a maker are asked for"
    return storage.maker


def _closure(
    block: BlockKind,
    maker: fx.Node,
    order: Mapping[fx.Node, int],
    kept: Container[fx.Node],
    again: Container[fx.Node],
) -> list[fx.Node] | None:
    """The ops that make a value out of what is kept; None where that is not there to be had."""
    found: dict[fx.Node, None] = {}
    waiting = [maker]
    while waiting:
        node = waiting.pop()
        if node in found or node in again:
            continue
        found[node] = None
        for given in node.all_input_nodes:
            if given in order:
                if given not in kept:
                    waiting.append(given)
            elif not _there(block, given):
                return None
    return sorted(found, key=order.__getitem__)


def _there(block: BlockKind, node: fx.Node) -> bool:
    """Whether a value from outside the block is at hand in its backward."""
    if node.op != "call_function" or node in block.received:
        return True
    return next(tensors_of(node.meta.get("val")), None) is None
