"""Branch and bound over microbatches, schedules, degrees and the longest stage's load.

A plan costs sum filling + max load. A *span* is the set of plans of one branch whose longest load
is one of the loads from ``first`` to ``last``: they cost at least ``first`` plus the minimum
filling of stages with no load over ``last``. Spans are halved, the most promising first, until none
can beat the best known plan. The minimum filling is first bounded by prices on devices (quick, any
number of pools), then found by counting devices if the tables for that are small enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Protocol

import numpy as np

from fxpart.solver.joint.arrays import Floats
from fxpart.solver.joint.device_count_dp import DeviceCountProgram
from fxpart.solver.joint.dp import BranchCosts, SearchBranch, StagePath
from fxpart.solver.joint.multipliers import LagrangeMultipliers, find_totals
from fxpart.solver.joint.stage_tables import Choice, SearchScope, StageEntries, StageTables
from fxpart.solver.work import SolverTimeout, work_seconds

EXACT = 1e-9  # relative difference below which two step times are equal
_QUICK = 2e-3  # gap at which prices stop and the counting of devices starts
_LOOKS = 12  # searches for plans while spans of one scope are halved
_FIRST_LOOKS = 2  # thresholds under which plans are searched before anything is proven
_SKETCH = 300  # states of each number of stages kept in that search
_MOST = 50_000  # states of each number of stages kept in a proof
_SHARPER = 0.01  # relative improvement of the best plan that makes filtering of tables worthwhile
_CEILINGS = (2.0, 8.0)  # multiples of the bound, while no plan is known
_WORK = 20_000_000  # limit on state extensions in all proofs


class Incumbent(Protocol):
    """The best choice so far."""

    seconds: float

    def add(self, choice: Any) -> float:
        """Evaluate a choice and store it if it is better; return its seconds, or infinity."""
        ...


class ScopeTables:
    """A scope with its tables."""

    def __init__(
        self,
        scope: SearchScope,
        branch: SearchBranch[Any],
        prices: LagrangeMultipliers,
        counted: DeviceCountProgram,
        best: float,
    ) -> None:
        """prices, counted: the two methods to bound its fillings. best: limit for its entries."""
        self.scope, self.looks = scope, _LOOKS
        self.equip(branch, prices, counted, best)

    def equip(
        self,
        branch: SearchBranch[Any],
        prices: LagrangeMultipliers,
        counted: DeviceCountProgram,
        best: float,
    ) -> None:
        """Replace the tables."""
        self.branch, self.prices, self.counted, self.best = branch, prices, counted, best
        self.loads: Floats = np.unique(branch.entries.load)

    def first(self, low: float) -> float:
        """Return the smallest load from ``low``."""
        place = int(np.searchsorted(self.loads, low, side="left"))
        return float(self.loads[place]) if place < len(self.loads) else inf

    def after(self, low: float) -> float:
        """Return the smallest load above ``low``."""
        return self.first(float(np.nextafter(low, inf)))

    def last(self, high: float) -> float:
        """Return the greatest load up to ``high``."""
        place = int(np.searchsorted(self.loads, high, side="right")) - 1
        return float(self.loads[place]) if place >= 0 else -inf


@dataclass(order=True)
class _JointLoadInterval:
    """Plans with a longest load from ``first`` to ``last`` and a filling of at least ``total``."""

    bound: float
    order: int
    scope: SearchScope = field(compare=False)
    opened: ScopeTables | None = field(compare=False, default=None)
    first: float = field(compare=False, default=0.0)
    last: float = field(compare=False, default=inf)
    total: float = field(compare=False, default=0.0)
    counted: bool = field(compare=False, default=False)


class JointSearch(Generic[Choice]):
    """Solves one problem with contiguous stages; ``bound`` is always proven."""

    def __init__(
        self,
        tables: StageTables[Choice],
        record: Incumbent,
        deadline: float,
        report: Callable[[str], None] = lambda phase: None,
        enough: float = inf,
        *,
        scopes: Sequence[tuple[float, SearchScope]] | None = None,
        gap: float = EXACT,
    ) -> None:
        """record: stores the plans found. report: reports the phase from time to time.

        enough: seconds from which on plans do not matter: a larger bound is not proven. scopes: the
        only ones to search, with a bound on each. gap: at which the search ends.
        """
        self.tables, self.record, self.runs = tables, record, tables.runs
        self.deadline, self.report, self.enough, self.gap = deadline, report, enough, gap
        self._scopes = tables.scopes() if scopes is None else scopes
        self._settled, self._made, self._work = inf, 0, _WORK
        self._open: list[_JointLoadInterval] = []
        self._leaves: list[_JointLoadInterval] = []
        self._current: _JointLoadInterval | None = None
        self._proven, self._ceiling = 0.0, inf
        self._fill()

    def _fill(self) -> None:
        """Start with all scopes, none of them opened."""
        self._ready = False  # an interrupt now leaves the previous proof valid
        self._settled, self._open, self._leaves = inf, [], []
        for bound, scope in self._scopes:
            self._push(bound, scope)
        self._ready = True

    @property
    def bound(self) -> float:
        """Return a lower bound in seconds on contiguous stages; infinite if nothing fits."""
        if not self._ready:
            return self._proven
        spans = [*self._open[:1], *self._leaves, *([self._current] if self._current else [])]
        return max(self._proven, min([self._settled, *(s.bound for s in spans)]))

    def prove(self) -> bool:
        """Search until the best plan is proven, or as far as time and work allow; return which.

        While no plan is known, only plans up to a ceiling are searched, which is then raised.
        """
        try:
            for factor in (*_CEILINGS, inf) if self.record.seconds == inf else (inf,):
                least = self.bound
                if least == inf:
                    return True
                self._ceiling = least * factor if least > 0 or factor == inf else 1e-9
                if not self._within():
                    return False
                if self.record.seconds <= self._ceiling:
                    return True
                self._proven = max(self._proven, self.bound)
                self._ceiling = inf
                self._fill()
        except SolverTimeout:
            return False
        return True

    def _within(self) -> bool:
        """Prove the best plan up to the ceiling, or that there is none."""
        self._narrow()
        self._open += self._leaves
        self._leaves = []
        heapq.heapify(self._open)
        return self._count()

    @property
    def _best(self) -> float:
        """Return the seconds that a plan has to beat."""
        return min(self.record.seconds, self._ceiling, self.enough)

    # -- by prices ---------------------------------------------------------------------------

    def _narrow(self) -> None:
        """Halve spans by price bounds, until these do not improve."""
        while self._next(_QUICK):
            span = self._current
            assert span is not None
            self.report("bounds by prices")
            if span.opened is None:
                self._start(span)
            elif not (self._settle if span.opened.counted.free else self._halve)(span):
                self._leaves.append(span)
            self._current = None

    def _next(self, gap: float) -> bool:
        """Process the most promising span; return whether it can still beat the best plan."""
        if not self._open or self._open[0].bound >= self._target(gap):
            return False
        if work_seconds() > self.deadline:
            raise SolverTimeout
        self._current = heapq.heappop(self._open)
        return True

    def _start(self, span: _JointLoadInterval) -> None:
        """Make the tables of a scope, and its first span."""
        scope = span.scope
        opened = self._opened(scope)
        if opened is None:
            self._settled = min(self._settled, self._best)
            return
        seconds = self._best
        first = max(opened.first(0.0), span.bound - seconds if seconds < inf else 0.0)
        if opened.counted.free:
            loads = BranchCosts(opened.branch, inf, opened.branch.entries.load)
            first = max(first, min(find_totals(opened.branch, loads, np.maximum)[scope.low :]))
            if opened.branch.exact:  # the first run of the span finds the total
                self._push(max(span.bound, first), scope, opened, first)
                return
        total = opened.prices.bound(inf, self._target(0.0) - first)
        if not opened.branch.exact and first + total < self._target(0.0):
            for half in scope.halves():
                self._push(max(span.bound, first + total), half)
            return
        self._sketch(opened, total)
        first = opened.first(0.0)
        self._push(max(span.bound, first + total), scope, opened, first, inf, total)

    def _opened(self, scope: SearchScope) -> ScopeTables | None:
        best = self._best
        entries = self.tables.entries(scope, best)
        if not len(entries):
            return None
        return ScopeTables(scope, *self._tools(scope, entries), best)

    def _tools(
        self, scope: SearchScope, entries: StageEntries
    ) -> tuple[SearchBranch[Choice], LagrangeMultipliers, DeviceCountProgram]:
        branch = SearchBranch(self.tables, entries, scope)
        # no plan yet: seconds of all stages in sequence on the slowest entries
        scale = self._best
        if scale == inf:
            scale = float((entries.filling + entries.load).max()) * branch.high

        def found(stages: StagePath) -> float:
            return self.record.add(branch.choice(stages))

        devices = self.tables.devices
        counted = DeviceCountProgram(branch, devices, self.deadline)
        return branch, LagrangeMultipliers(branch, devices, found, scale), counted

    def _sharpened(self, span: _JointLoadInterval) -> ScopeTables:
        """Return the span's tables without entries that a much faster plan has ruled out."""
        opened = span.opened
        assert opened is not None
        if self._best < opened.best * (1 - _SHARPER):
            scope, best = opened.scope, self._best
            entries = self.tables.sharper(opened.branch.entries, scope, best)
            opened.best = best
            if len(entries):
                branch, prices, counted = self._tools(scope, entries)
                prices.prices = opened.prices.prices
                opened.equip(branch, prices, counted, best)
        span.first = opened.first(span.first)
        return opened

    def _sketch(self, opened: ScopeTables, total: float) -> None:
        """Search plans heuristically with few states: halve the threshold a few times."""
        low, high = opened.first(0.0), self._target(_QUICK) - total
        for _ in range(_FIRST_LOOKS):
            load = self._look(opened, high)
            if load <= low:
                break
            high = (low + load) / 2 if load < inf else (high + self._target(0.0) - total) / 2

    def _look(self, opened: ScopeTables, threshold: float) -> float:
        """Record a good path under a threshold and return its longest load."""
        costs, goal = BranchCosts(opened.branch, threshold), self._best - opened.first(0.0)
        found = opened.counted.run(costs, goal, opened.prices.prices, _SKETCH)
        if found.path is None:
            return inf
        self.record.add(opened.branch.choice(found.path))
        return float(opened.branch.entries.load[list(found.path.entries)].max())

    def _halve(self, span: _JointLoadInterval) -> bool:
        """Bound the lower half by prices and push the parts that may win; False if indivisible."""
        opened = self._sharpened(span)
        last = opened.last(min(span.last, self._target(0.0) - span.total))
        if last < span.first:
            self._settled = min(self._settled, self._best, span.first + span.total)
            return True
        middle = opened.last((span.first + last) / 2)
        if middle < span.first or middle >= last:
            return False
        goal = self._target(0.0) - span.first
        total = max(span.total, opened.prices.bound(middle, goal))
        if total < goal and opened.looks > 0:
            opened.looks -= 1
            self._look(opened, middle)
        self._push(
            max(span.bound, span.first + total), span.scope, opened, span.first, middle, total
        )
        after = opened.after(middle)
        self._push(max(span.bound, after + span.total), span.scope, opened, after, last, span.total)
        return True

    def _push(
        self,
        bound: float,
        scope: SearchScope,
        opened: ScopeTables | None = None,
        first: float = 0.0,
        last: float = inf,
        total: float = 0.0,
        *,
        counted: bool = False,
    ) -> None:
        if bound >= self._best * (1 - EXACT):
            self._settled = min(self._settled, bound, self._best)  # slower plans were omitted
            return
        self._made += 1
        span = _JointLoadInterval(bound, self._made, scope, opened, first, last, total, counted)
        heapq.heappush(self._open, span)

    def _target(self, gap: float) -> float:
        return self._best * (1 - max(gap, EXACT))

    # -- by counting devices -----------------------------------------------------------------

    def _count(self) -> bool:
        """Settle spans by counting devices; return whether the best plan is proven."""
        while self._next(self.gap):
            span = self._current
            assert span is not None
            self.report("devices counted")
            if span.opened is None:
                self._start(span)
            elif not self._settle(span):
                self._leaves.append(span)
            self._current = None
        return not self._leaves

    def _settle(self, span: _JointLoadInterval) -> bool:
        """Find the best plan of a span, or of its lower half; return False if that is too much
        work."""
        opened = self._sharpened(span)
        last = opened.last(min(span.last, self._target(0.0) - span.total))
        if last < span.first:
            self._settled = min(self._settled, self._best, span.first + span.total)
            return True
        threshold = last
        if span.counted:
            threshold = max(opened.last((span.first + last) / 2), span.first)
        if self._work <= 0:
            return False
        done, goal = opened.counted.work, self._best - span.first
        costs = BranchCosts(opened.branch, threshold)
        found = opened.counted.run(costs, goal, opened.prices.prices, _MOST)
        self._work -= opened.counted.work - done
        total, below = max(span.total, found.bound), threshold
        if found.path is not None:
            self.record.add(opened.branch.choice(found.path))
            load = float(opened.branch.entries.load[list(found.path.entries)].max())
            if found.bound == found.filling:
                # no plan with a load from this one's to the threshold is better
                self._settled = min(self._settled, found.filling + load)
                below = opened.last(float(np.nextafter(load, -inf)))
        elif found.bound == inf:
            self._settled = min(self._settled, goal + span.first)
            below = -inf
        if below >= span.first == threshold:
            span.bound = max(span.bound, span.first + total)
            return span.bound >= self._target(0.0)
        scope, first = span.scope, span.first
        if below >= first:
            self._push(
                max(span.bound, first + total), scope, opened, first, below, total, counted=True
            )
        if threshold < last:
            after = opened.after(threshold)
            self._push(
                max(span.bound, after + span.total),
                scope,
                opened,
                after,
                last,
                span.total,
                counted=True,
            )
        return True
