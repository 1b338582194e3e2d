"""Ideals: sets of blocks closed under predecessors, which are where one device may end."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from .blocks import Blocks, Floats
from .watch import MaxLoadWatch

_CHUNK = 1024  # ideals at a time, where bits become numbers
_RANDOM_ORDERS = 4


def all_ideals(blocks: Blocks, most: int, watch: MaxLoadWatch) -> list[int] | None:
    """Every ideal as a bit mask, by number of blocks; None if there are more than ``most``."""
    needs = [_mask(p) for p in blocks.predecessors]
    level = {0: _mask([b for b, n in enumerate(needs) if not n])}  # what may be added to each
    found: list[int] = []
    while level:
        watch.left()
        found += level
        following: dict[int, int] = {}
        for ideal, ready in level.items():
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                larger = ideal | bit
                if larger not in following:
                    more = ready ^ bit
                    for b in blocks.successors[bit.bit_length() - 1]:
                        if not needs[b] & ~larger:
                            more |= 1 << b
                    following[larger] = more
        if len(found) + len(following) > most:
            return None
        level = following
    return found


def prefixes(blocks: Blocks, seed: int, watch: MaxLoadWatch) -> list[int]:
    """The ideals that are prefixes of a few good topological orders."""
    found = {0: None}
    for order in _orders(blocks, seed, watch):
        found |= dict.fromkeys(accumulate((1 << b for b in order), int.__or__))
    return list(found)


def walk(blocks: Blocks) -> list[int]:
    """One topological order: depth first."""
    return _walk(blocks.predecessors, blocks.successors, lambda b, step: (-step, b))


def _orders(blocks: Blocks, seed: int, watch: MaxLoadWatch) -> list[list[int]]:
    """Topological orders: breadth first, depth first, from both ends, narrow ones, random ones."""
    ahead, back = (blocks.predecessors, blocks.successors), (blocks.successors, blocks.predecessors)
    made = []
    for before, after in (ahead, back):
        watch.left()
        found = [
            _walk(before, after, lambda b, _: b),
            _walk(before, after, lambda b, step: (-step, b)),
            _walk(before, after, lambda b, step: (step, b)),
            _narrow(blocks, before, after),
        ]
        made += found if before is ahead[0] else [order[::-1] for order in found]
    draw = random.Random(seed)
    for _ in range(_RANDOM_ORDERS):
        watch.left()
        made.append(_walk(*ahead, lambda b, step: (-step, draw.random(), b)))
    return made


def _walk(
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    key: Callable[[int, int], object],
) -> list[int]:
    """The order that always takes the ready block with the least key(block, step it got ready)."""
    waiting = [len(p) for p in before]
    heap: list[tuple[object, int]] = [(key(b, 0), b) for b, n in enumerate(waiting) if not n]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, b = heapq.heappop(heap)
        order.append(b)
        for c in after[b]:
            waiting[c] -= 1
            if not waiting[c]:
                heapq.heappush(heap, (key(c, len(order)), c))
    return order


def _narrow(
    blocks: Blocks, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> list[int]:
    """The order that opens as little as it can: nets with some pins taken and some not."""
    waiting = [len(p) for p in before]
    untaken = [len(pins) for pins in blocks.nets]
    ready, order = [b for b, n in enumerate(waiting) if not n], []

    def opened(b: int) -> tuple[float, int]:
        cost = 0.0
        for p in blocks.nets_of[b]:
            if untaken[p] == 1:
                cost -= float(blocks.costs[p])
            elif untaken[p] == len(blocks.nets[p]):
                cost += float(blocks.costs[p])
        return cost, b

    while ready:
        b = min(ready, key=opened)
        ready.remove(b)
        order.append(b)
        for p in blocks.nets_of[b]:
            untaken[p] -= 1
        for c in after[b]:
            waiting[c] -= 1
            if not waiting[c]:
                ready.append(c)
    return order


class Ideals:
    """Ideals with their sums, in an order where a part never comes after the whole.

    work, cpu, size, unable (blocks that no accelerator runs), frontier (cost of the nets with pins
    on both sides): [ideal]. pins: how many pins of each net it holds, [net, ideal]. words: the bit
    masks in pieces of 64, [word, ideal].
    """

    def __init__(self, blocks: Blocks, masks: list[int], watch: MaxLoadWatch) -> None:
        """Sort the ideals by work, in whole steps so that rounding disturbs no order."""
        n, count = len(blocks), len(masks)
        step = max(float(blocks.work.sum()), 1e-300) / 2**40
        whole = np.floor(np.where(blocks.runs, blocks.work, 0.0) / step)
        bits = _bits(masks, n)
        key, number = _sums(watch, bits, whole)[0], bits.sum(axis=0, dtype=np.int64)
        order = np.lexsort((np.arange(count), number, key))
        self.masks = [masks[i] for i in order]
        bits = np.ascontiguousarray(bits[:, order])
        self.floor = key[order] * step  # never above work, and rising
        work = np.where(blocks.runs, blocks.work, 0.0)
        self.work, self.cpu, self.size = _sums(watch, bits, work, blocks.cpu, blocks.size)
        self.unable = bits[~blocks.runs].sum(axis=0, dtype=np.int64)
        widest = max(map(len, blocks.nets), default=0)
        kind = np.uint8 if widest < 256 else np.uint16
        self.pins = np.zeros((len(blocks.nets), count), dtype=kind)
        self.frontier = np.zeros(count)
        for p, pins in enumerate(blocks.nets):
            watch.left()
            np.sum(bits[list(pins)], axis=0, dtype=kind, out=self.pins[p])
            crossed = (self.pins[p] > 0) & (self.pins[p] < len(pins))
            self.frontier[crossed] += blocks.costs[p]
        packed = np.packbits(bits, axis=0, bitorder="little")
        padded = np.zeros((-(-n // 64) * 8, count), dtype=np.uint8)
        padded[: len(packed)] = packed
        self.words = np.ascontiguousarray(
            np.ascontiguousarray(padded.T).view(np.uint64).T  # 8 bytes of one ideal side by side
        )

    def __len__(self) -> int:
        return len(self.masks)


def _sums(watch: MaxLoadWatch, bits: npt.NDArray[np.uint8], *of: Floats) -> Floats:
    """Sums of each of some properties of the blocks, over the blocks of each ideal."""
    rows, found = np.stack(of), np.empty((len(of), bits.shape[1]))
    for a in range(0, bits.shape[1], _CHUNK):
        watch.left()
        found[:, a : a + _CHUNK] = rows @ bits[:, a : a + _CHUNK].astype(np.float64)
    return found


def _mask(blocks: Sequence[int]) -> int:
    return sum(1 << b for b in blocks)


def _bits(masks: list[int], n: int) -> npt.NDArray[np.uint8]:
    """Whether each block is in each ideal: [block, ideal]."""
    width = -(-n // 8)
    raw = np.frombuffer(b"".join(m.to_bytes(width, "little") for m in masks), dtype=np.uint8)
    bits = np.unpackbits(raw.reshape(len(masks), width), axis=1, bitorder="little")
    return np.ascontiguousarray(bits[:, :n].T)
