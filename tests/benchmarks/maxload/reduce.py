"""Exact reductions: merges that keep an optimal assignment, or every one that is good enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .blocks import Blocks, merge
from .bounds import Offload, slack


def reduce(blocks: Blocks, load: float = float("inf")) -> Blocks:
    """Merge until nothing more can be merged.

    Keeps at least one of the best among all assignments whose objective is at most ``load``.
    """
    while True:
        count = len(blocks)
        blocks = fuse_circles(blocks)
        blocks = merge(blocks, _idle(blocks))
        blocks = merge(blocks, _uncuttable(blocks, load))
        if len(blocks) == count:
            return blocks


def fuse_circles(blocks: Blocks) -> Blocks:
    """Blocks that wait for each other in a circle can only lie on one device."""
    component = _components(blocks.successors)
    first: dict[int, int] = {}
    pairs = [(first.setdefault(c, b), b) for b, c in enumerate(component)]
    return merge(blocks, pairs) if len(first) < len(blocks) else blocks


def _uncuttable(blocks: Blocks, load: float) -> list[tuple[int, int]]:
    """Pins of nets that cost more to cut than all accelerators have room for.

    A net that is cut costs each accelerator that holds a part: at least two, or one where a CPU
    core may hold the rest. Two CPU cores may share one for nothing.
    """
    if load == float("inf") or blocks.cpus > 1:
        return []
    room = slack(blocks, Offload(blocks), load) / (1 if blocks.cpus else 2)
    room += 1e-9 * load
    return [
        (pins[0], b)
        for pins, cost in zip(blocks.nets, blocks.costs, strict=True)
        if cost > room
        for b in pins[1:]
    ]


def _idle(blocks: Blocks) -> list[tuple[int, int]]:
    """Blocks without work, each with a neighbour that it may as well lie with.

    Moving block z to the device of v costs no device more, if the nets of z without v cost no more
    together than those of z and v alone: wherever the former become cut, the latter were. And no
    circle arises, if each new order of two devices held already, by v itself or through z.
    """
    idle = blocks.runs & (blocks.work == 0)
    if blocks.cpus:
        idle &= blocks.cpu == 0
    if not blocks.roomy:
        idle &= blocks.size == 0
    used: set[int] = set()
    found = []
    for z in map(int, np.flatnonzero(idle)):
        near = {
            *(b for p in blocks.nets_of[z] for b in blocks.nets[p]),
            *blocks.successors[z],
            *blocks.predecessors[z],
        } - {z}
        if not near and len(blocks) > 1:
            near = {1 if z == 0 else 0}
        if z in used:
            continue
        for v in sorted(near):
            if v not in used and _harmless(blocks, z, v) and _orderly(blocks, z, v):
                found.append((z, v))
                # other merges around are judged again once this one is done
                used |= near | {z} | {*blocks.successors[v], *blocks.predecessors[v]}
                break
    return found


def _harmless(blocks: Blocks, z: int, v: int) -> bool:
    lost = saved = 0.0
    for p in blocks.nets_of[z]:
        pins = blocks.nets[p]
        if v not in pins:
            lost += float(blocks.costs[p])
        elif len(pins) == 2:
            saved += float(blocks.costs[p])
    return lost <= saved


def _orderly(blocks: Blocks, z: int, v: int) -> bool:
    before, after = set(blocks.predecessors[z]), set(blocks.successors[z])
    if v in after:
        return after <= {v, *blocks.successors[v]}
    if v in before:
        return before <= {v, *blocks.predecessors[v]}
    return before <= set(blocks.predecessors[v]) and after <= set(blocks.successors[v])


def _components(successors: Sequence[Sequence[int]]) -> list[int]:
    """The strongly connected component of each vertex (Tarjan, without recursion)."""
    count = len(successors)
    index, low, component = [-1] * count, [0] * count, [-1] * count
    stack: list[int] = []
    steps = parts = 0
    for start in range(count):
        work = [(start, 0)] if index[start] < 0 else []
        while work:
            v, i = work.pop()
            if i == 0:
                index[v] = low[v] = steps
                steps += 1
                stack.append(v)
            elif component[successors[v][i - 1]] < 0:
                low[v] = min(low[v], low[successors[v][i - 1]])
            if i < len(successors[v]):
                work.append((v, i + 1))
                w = successors[v][i]
                if index[w] < 0:
                    work.append((w, 0))
            elif low[v] == index[v]:
                while True:
                    w = stack.pop()
                    component[w] = parts
                    if w == v:
                        break
                parts += 1
    return component
