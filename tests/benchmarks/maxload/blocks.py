"""Blocks: what is placed whole, with everything the solvers need as arrays.

A producer and its consumers are a net. An accelerator that holds some but not all pins of a net
pays the net's cost, once, whether it pushes or pulls: so nets are sets, without direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .instance import Instance, Mode, groups, order_edges

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Blocks:
    """The problem over blocks 0..n-1, in order of their first node.

    members: node positions, [block]. work, cpu: time on an accelerator and on a CPU core, [block];
    size: bytes, [block]; runs: whether an accelerator can run it, [block]. nets: sorted blocks, at
    least two each, no two alike; costs: [net]. edges: pairs of blocks whose devices must not form
    a circle (none where any assignment will do).
    """

    members: tuple[tuple[int, ...], ...]
    work: Floats
    cpu: Floats
    size: Floats
    runs: npt.NDArray[np.bool_]
    nets: tuple[tuple[int, ...], ...]
    costs: Floats
    edges: tuple[tuple[int, int], ...]
    accelerators: int
    cpus: int
    memory: float

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Blocks that come directly after each, [block]."""
        return _lists(self.edges, len(self))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Blocks that come directly before each, [block]."""
        return _lists(((b, a) for a, b in self.edges), len(self))

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets that each block is a pin of, [block]."""
        return _lists(((b, p) for p, pins in enumerate(self.nets) for b in pins), len(self))

    @property
    def roomy(self) -> bool:
        """Whether memory forbids nothing: one accelerator has room for everything."""
        return float(self.size.sum()) <= self.memory * (1 - 1e-12)

    def assignment(self, device: Sequence[int]) -> tuple[int, ...]:
        """A device for each node from a device for each block."""
        found = [0] * sum(map(len, self.members))
        for nodes, d in zip(self.members, device, strict=True):
            for node in nodes:
                found[node] = int(d)
        return tuple(found)

    def devices(self, assignment: Sequence[int]) -> list[int] | None:
        """A device for each block, None where an assignment takes a block apart."""
        found = [assignment[nodes[0]] for nodes in self.members]
        same = all(
            assignment[node] == d
            for nodes, d in zip(self.members, found, strict=True)
            for node in nodes
        )
        return found if same else None


def _lists(pairs: Iterable[tuple[int, int]], count: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(count)]
    for a, b in pairs:
        found[a].append(b)
    return tuple(map(tuple, found))


def make_blocks(instance: Instance, mode: Mode) -> Blocks:
    """One block for each group of the instance."""
    group = groups(instance)
    count = max(group, default=-1) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for position, g in enumerate(group):
        members[g].append(position)
    nodes = instance.nodes
    pins: dict[int, set[int]] = {}
    for u, v in instance.edges:
        pins.setdefault(u, {group[u]}).add(group[v])
    nets = _nets((sorted(p), nodes[u].transfer) for u, p in sorted(pins.items()))
    return Blocks(
        members=tuple(map(tuple, members)),
        work=_array(sum(nodes[i].accelerator for i in m) for m in members),
        cpu=_array(sum(nodes[i].cpu for i in m) for m in members),
        size=_array(sum(nodes[i].bytes for i in m) for m in members),
        runs=np.array([all(nodes[i].runs for i in m) for m in members], dtype=np.bool_),
        nets=tuple(nets),
        costs=_array(nets.values()),
        edges=tuple(order_edges(instance, group)) if mode == "chain" else (),
        accelerators=instance.accelerators,
        cpus=instance.cpus,
        memory=instance.memory,
    )


def merge(blocks: Blocks, pairs: Iterable[tuple[int, int]]) -> Blocks:
    """The same problem where the blocks of each pair are one."""
    root = list(range(len(blocks)))

    def find(b: int) -> int:
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        return b

    for a, b in pairs:
        low, high = sorted((find(a), find(b)))
        root[high] = low
    roots = [find(b) for b in range(len(blocks))]
    number = {r: i for i, r in enumerate(sorted(set(roots)))}
    label = np.array([number[r] for r in roots], dtype=np.intp)
    members: list[list[int]] = [[] for _ in number]
    for old, new in enumerate(label):
        members[new].extend(blocks.members[old])
    count = len(number)
    nets = _nets(
        (sorted({int(label[b]) for b in pins}), float(cost))
        for pins, cost in zip(blocks.nets, blocks.costs, strict=True)
    )
    edges = {(int(label[a]), int(label[b])) for a, b in blocks.edges}
    return Blocks(
        members=tuple(tuple(sorted(m)) for m in members),
        work=_array(np.bincount(label, blocks.work, count)),
        cpu=_array(np.bincount(label, blocks.cpu, count)),
        size=_array(np.bincount(label, blocks.size, count)),
        runs=np.bincount(label, ~blocks.runs, count) == 0,
        nets=tuple(nets),
        costs=_array(nets.values()),
        edges=tuple(sorted((a, b) for a, b in edges if a != b)),
        accelerators=blocks.accelerators,
        cpus=blocks.cpus,
        memory=blocks.memory,
    )


def _nets(found: Iterable[tuple[list[int], float]]) -> dict[tuple[int, ...], float]:
    """The cost of each set of pins, without those that cost nothing or cannot be cut."""
    costs: dict[tuple[int, ...], float] = {}
    for pins, cost in found:
        if len(pins) > 1 and cost > 0:
            costs[tuple(pins)] = costs.get(tuple(pins), 0.0) + cost
    return costs


def _array(numbers: Iterable[float]) -> Floats:
    return np.array(list(numbers), dtype=np.float64)
