"""Cost of every interval of blocks as a group of replicas, for each mix of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fxpart.solver.replicated_chain.gradient_reduction import (
    IntervalGradients,
    compute_sparse_row_fraction,
)
from fxpart.solver.replicated_chain.problem import ReplicatedChainProblem
from fxpart.solver.replicated_chain.round_robin import compute_makespans
from fxpart.solver.schedule_costs import keeps_all
from fxpart.solver.tables import Floats, Ints, PartitionTables

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ReplicaGroupTable:
    """Bands over (first unit, units less one) of one mix of devices at one microbatch size.

    slowest: t; load: M - t + beta, both in seconds and infinite if the interval does not exist, if
    a replica would get no microbatch, or if nothing fits. fits(behind): where memory suffices with
    so many devices after the group.
    """

    slowest: Floats
    load: Floats
    most: tuple[Ints, ...]
    least: Ints
    flights: tuple[Ints, ...]
    microbatches: int

    def fits(self, behind: int, schedule: str) -> Mask:
        """Return where each replica has memory for its microbatches in flight.

        Under 1F1B about the microbatches that pass while one goes to the end and back: one cycle of
        the replicas plus one microbatch for each later device, by its share (Little's law, as in
        :mod:`fxpart.schedule.builders.replica_warmup` for equal replicas).
        """
        m, found = self.microbatches, np.ones(self.slowest.shape, dtype=bool)
        for taken, allowed in zip(self.most, self.flights, strict=True):
            flying = taken
            if not keeps_all(schedule):
                around = m + behind * self.least
                flying = np.minimum(taken, -(-taken * around // (m * np.maximum(self.least, 1))))
            found &= flying <= allowed
        return found

    def may_fit(self) -> Mask:
        """Return where memory suffices for one microbatch in flight: no schedule needs less."""
        found = np.ones(self.slowest.shape, dtype=bool)
        for allowed in self.flights:
            found &= allowed >= 1
        return found


class ReplicatedChainTables:
    """The interval tables of one problem."""

    def __init__(self, problem: ReplicatedChainProblem) -> None:
        """Sum the costs that do not depend on the microbatch size."""
        self.problem = problem
        base = problem.by_kind
        self.tables = PartitionTables(base)
        self._gradients = IntervalGradients(self.tables)
        self._kept: dict[tuple[int, tuple[int, ...]], ReplicaGroupTable] = {}

    def group(self, variant: int, counts: tuple[int, ...]) -> ReplicaGroupTable:
        """Return the table of groups with these devices."""
        key = variant, counts
        if key not in self._kept:
            self._kept[key] = self._make(variant, counts)
        return self._kept[key]

    def _make(self, variant: int, counts: tuple[int, ...]) -> ReplicaGroupTable:
        tables = self.tables.variant(variant)
        m, valid = tables.variant.microbatches, self.tables.valid
        used = [kind for kind, n in enumerate(counts) if n]
        stages = [tables.stage(kind + 1) for kind in used]
        each = [np.where(valid, s.seconds, 1.0) for s in stages]
        each = [np.maximum(seconds, 1e-12) for seconds in each]
        longest, most, least = compute_makespans(each, [counts[kind] for kind in used], m)
        slowest = np.max(each, axis=0)
        loads = [np.where(valid, s.load, 0.0) for s in stages]
        once = np.max([a - (m - 1) * b for a, b in zip(loads, each, strict=True)], axis=0)
        there = valid & (least >= 1)
        load = longest - slowest + once + self._sums(counts, used)
        return ReplicaGroupTable(
            slowest=np.where(there, slowest, np.inf),
            load=np.where(there, load, np.inf),
            most=tuple(most),
            least=least,
            flights=tuple(
                np.where(self._room(kind, sum(counts)), s.flights, np.int64(-1))
                for kind, s in zip(used, stages, strict=True)
            ),
            microbatches=m,
        )

    def _room(self, kind: int, copies: int) -> Mask:
        """Return where a device has memory for the gradient reduction of replicas."""
        needed = self.tables.state_bytes + (self._gradients.summing if copies > 1 else 0)
        return needed <= self.problem.by_kind.devices[kind + 1].memory

    def _sums(self, counts: Sequence[int], used: Sequence[int]) -> Floats:
        """Return the seconds of the gradient reduction of the replicas."""
        kinds = [self.problem.kinds[kind] for kind in used]
        given, copies = self._gradients, sum(counts)
        sent = given.dense + given.rows * compute_sparse_row_fraction(copies)
        line = max(k.latency for k in kinds) + sent * max(k.inverse_bandwidth for k in kinds)
        return np.where(sent > 0, 2 * (copies - 1) * line, 0.0)

    @cached_property
    def mixes(self) -> tuple[tuple[int, ...], ...]:
        """Return every number of devices of each kind that a group may have."""
        sizes = [range(kind.devices + 1) for kind in self.problem.kinds]
        grid = np.array(np.meshgrid(*sizes, indexing="ij")).reshape(len(sizes), -1).T
        return tuple(tuple(int(x) for x in row) for row in grid if row.any())
