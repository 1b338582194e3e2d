"""What no assignment can go below, without looking at the graph, and what CPU cores can take."""

from __future__ import annotations

from math import inf

import numpy as np

from .blocks import Blocks


class Offload:
    """How much accelerator work CPU cores can take at most.

    A fractional knapsack: the blocks with most accelerator time for each unit of CPU time first.
    """

    def __init__(self, blocks: Blocks) -> None:
        """Sort the blocks once."""
        free = blocks.runs & (blocks.work > 0)
        work, cpu = blocks.work[free], blocks.cpu[free]
        with np.errstate(divide="ignore"):
            order = np.argsort(-work / cpu, kind="stable")
        self._work = np.concatenate(([0.0], np.cumsum(work[order])))
        self._cpu = np.concatenate(([0.0], np.cumsum(cpu[order])))
        self.forced = float(blocks.cpu[~blocks.runs].sum())
        self.total = float(blocks.work[blocks.runs].sum())
        self.cpus = blocks.cpus

    def saved(self, cpus: int, load: float) -> float:
        """Accelerator work that ``cpus`` cores of at most ``load`` can take."""
        if cpus == 0:
            return 0.0
        room = cpus * load
        if room >= self._cpu[-1]:
            return float(self._work[-1])
        last = int(np.searchsorted(self._cpu, room, side="right"))
        share = (room - self._cpu[last - 1]) / (self._cpu[last] - self._cpu[last - 1])
        taken = self._work[last - 1] + share * (self._work[last] - self._work[last - 1])
        return float(taken) * (1 + 1e-12)

    def rest(self, load: float) -> float:
        """Work left to the accelerators where all cores do what they can."""
        room = load * self.cpus - self.forced
        if self.cpus == 0:
            return self.total if self.forced == 0 else inf
        return self.total - self.saved(1, room) if room >= 0 else inf


def slack(blocks: Blocks, offload: Offload, load: float) -> float:
    """Transfer time that all accelerators have room for, where no load exceeds ``load``."""
    return blocks.accelerators * load - offload.rest(load)


def cheap_bound(blocks: Blocks) -> float:
    """A load that every assignment reaches: by its largest block, and by total work."""
    offload = Offload(blocks)
    least = np.where(blocks.runs & (blocks.accelerators > 0), blocks.work, inf)
    if blocks.cpus:
        least = np.minimum(least, blocks.cpu)
    low = float(least.max(initial=0.0))
    if low == inf or blocks.accelerators * low - offload.rest(low) >= 0:
        return low
    high = max(low, offload.total, offload.forced, 1e-300)
    if offload.rest(high) == inf or blocks.accelerators * high < offload.rest(high):
        high = (float(blocks.cpu.sum()) + high) * 2 if blocks.cpus else inf
        if high == inf:
            return inf
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if slack(blocks, offload, middle) < 0:
            low = middle
        else:
            high = middle
    return low * (1 - 1e-12)
