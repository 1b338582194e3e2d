"""Candidate stages of a problem, of which the searches and the integer program make plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from fxpart.solver.joint.arrays import Floats, Ints, Mask
from fxpart.solver.joint.problem import StagePin
from fxpart.solver.tables import UnitBands

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class SearchScope:
    """Plans of one microbatch count, schedule, set of options, and range of stages."""

    microbatches: int
    schedule: str
    options: Ints
    low: int
    high: int

    def halves(self) -> tuple[SearchScope, SearchScope]:
        """Return both halves of the range of stages."""
        middle = (self.low + self.high) // 2
        return replace(self, high=middle), replace(self, low=middle + 1)


@dataclass(frozen=True)
class StageEntries:
    """Candidate stages of one scope, sorted by group, class, filling and option; one row each.

    filling: fill * t; load: (m - fill) t + beta; flights: the most microbatches in flight that
    memory allows. A group is a number of devices (``size``) of a ``pool``.
    """

    option: Ints
    cls: Ints
    group: Ints
    filling: Floats
    load: Floats
    flights: Ints
    pool: Ints
    size: Ints

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.option)

    @classmethod
    def sort(
        cls,
        rows: Sequence[tuple[Ints, Ints, Ints, Floats, Floats, Ints]],
        pool: Ints,
        size: Ints,
    ) -> StageEntries:
        """Return the entries of these columns, from option to flights, without dominated ones."""
        if not rows:
            none = np.zeros(0, dtype=np.int64)
            return cls(none, none, none, none.astype(float), none.astype(float), none, pool, size)
        option, run, group, filling, load, flights = (
            np.concatenate([x[k] for x in rows]) for k in range(6)
        )
        order = np.lexsort((option, -flights, load, filling, run, group))
        key = group[order] * (int(run.max(initial=0)) + 1) + run[order]
        order = order[~_beaten(key, load[order], flights[order])]
        return cls(
            option[order], run[order], group[order], filling[order], load[order], flights[order],
            pool, size,
        )  # fmt: skip

    def keep(self, kept: Mask) -> StageEntries:
        """Return some of the entries."""
        return StageEntries(
            self.option[kept], self.cls[kept], self.group[kept], self.filling[kept],
            self.load[kept], self.flights[kept], self.pool, self.size,
        )  # fmt: skip


class StageTables(ABC, Generic[Choice]):
    """The entries of one problem, made on demand.

    runs: the classes of runs of blocks. devices: of each pool. pins: constraints on stages.
    """

    runs: UnitBands
    devices: Ints
    pins: tuple[StagePin, ...] = ()

    @abstractmethod
    def scopes(self) -> list[tuple[float, SearchScope]]:
        """Return the scopes that contain all plans, and a lower bound in seconds on each."""

    @abstractmethod
    def entries(self, scope: SearchScope, best: float) -> StageEntries:
        """Return the candidate stages of plans that take at most ``best`` seconds."""

    @abstractmethod
    def sharper(self, entries: StageEntries, scope: SearchScope, best: float) -> StageEntries:
        """Filter entries once a faster plan is known."""

    @abstractmethod
    def choice(self, scope: SearchScope, starts: Sequence[int], options: Sequence[int]) -> Choice:
        """Return the choice of the first block and the option of each stage."""

    @abstractmethod
    def path(self, scope: SearchScope, choice: Choice) -> list[tuple[int, int, int, int]] | None:
        """Return first block, pool, devices and option (-1: open) of the stages; None: not here."""

    def list_groups(self, entries: StageEntries, stage: int) -> tuple[int, ...] | None:
        """Return the groups that stage ``stage`` may have; None: any."""
        return None


def _beaten(key: Ints, load: Floats, flights: Ints) -> Mask:
    """Return entries dominated by an earlier one of the same key, which has no longer filling."""
    beaten = np.zeros(len(key), dtype=bool)
    step = 1
    while step < len(key):
        same = key[step:] == key[:-step]
        if not same.any():
            break
        worse = same & (load[:-step] <= load[step:]) & (flights[:-step] >= flights[step:])
        beaten[step:] |= worse
        step += 1
    return beaten
