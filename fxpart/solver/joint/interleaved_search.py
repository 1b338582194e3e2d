"""Interleaved pipelines, in which a stage has several pieces: enumeration or heuristic search.

If there are few choices, they are enumerated, which is exact. Otherwise balanced pieces with one
option for all stages are tried, and their cuts shifted while that improves. The bound is then the
cheap one, which is valid for pieces anywhere.
"""

from __future__ import annotations

import heapq
from itertools import chain, islice
from math import inf

import numpy as np

from fxpart.schedule.spec import INTERLEAVED
from fxpart.solver.greedy import split_balanced
from fxpart.solver.joint.arrays import JointArrays
from fxpart.solver.joint.bounds import CheapBounds
from fxpart.solver.joint.enumeration import choices, count
from fxpart.solver.joint.greedy import estimates
from fxpart.solver.joint.problem import JointChoice
from fxpart.solver.joint.record import JointRecord
from fxpart.solver.work import work_seconds

_FEW = 4000  # choices that are enumerated
_MORE = 20_000  # choices that are tried where none is known
_TRIES = 40  # combinations of microbatches, pieces, option and stages that are tried
_SHIFTS = 300  # shifts of one cut that are tried


class InterleavedSearch:
    """The interleaved choices of one problem; ``bound`` is always proven."""

    def __init__(
        self, stacked: JointArrays, bounds: CheapBounds, record: JointRecord, deadline: float
    ) -> None:
        """record: stores the choices found. deadline: a ``work_seconds()`` value."""
        self.stacked, self.bounds, self.record = stacked, bounds, record
        self.deadline = deadline
        problem = stacked.problem
        self.bound = min(
            (
                bounds.bound(m, INTERLEAVED, options, v)
                for m in problem.microbatches
                for options in stacked.groups()
                for v in problem.virtual
                if INTERLEAVED in problem.schedules
            ),
            default=inf,
        )

    def enumerate(self) -> None:
        """Enumerate all choices if they are few and one may still be the best.

        Where they are many and no plan is known yet, choices with one option for all stages are
        tried until one fits, at most ``_MORE``.
        """
        problem, usable = self.stacked.problem, self._usable()
        if self.bound >= self.record.seconds:
            return
        if count(problem, (INTERLEAVED,), usable) > _FEW:
            if self.record.choice is None:
                self._find_any(usable)
            return
        for choice in choices(problem, (INTERLEAVED,), usable):
            if work_seconds() > self.deadline:
                return
            self.record.add(choice)
        self.bound = self.record.seconds

    def _find_any(self, usable: list[int]) -> None:
        """Record the first choice that fits, with its cuts shifted."""
        problem = self.stacked.problem
        alike = chain.from_iterable(choices(problem, (INTERLEAVED,), [k]) for k in usable)
        for choice in islice(alike, _MORE):
            if work_seconds() > self.deadline:
                return
            if self.record.add(choice) < inf:
                self._shift(choice, self.record.seconds)
                return

    def _usable(self) -> list[int]:
        """Return the options that have work and memory for some block."""
        microbatches = self.stacked.problem.microbatches
        works = [np.isfinite(self.bounds.costs(m)[0]).any(axis=1) for m in microbatches]
        return [int(option) for option in np.flatnonzero(np.any(works, axis=0))]

    def attempt(self) -> None:
        """Record balanced choices with one option for all stages, and shift the best one's cuts."""
        problem = self.stacked.problem
        if self.bound == inf:
            return
        ranked = [
            (seconds, k, v, option, stages)
            for k, m in enumerate(problem.microbatches)
            for v in problem.virtual
            for seconds, option, stages in estimates(self.stacked, self.bounds, m, INTERLEAVED, v)
        ]
        best, chosen = inf, None
        for _, k, v, option, stages in heapq.nsmallest(_TRIES, ranked):
            if work_seconds() > self.deadline and self.record.choice is not None:
                return
            m = problem.microbatches[k]
            costs = self.bounds.costs(m)[0][option][self.stacked.kinds].tolist()
            starts = split_balanced(costs, problem.no_cut_after, stages * v)
            if starts is None:
                continue
            choice = JointChoice(
                microbatches=m,
                schedule=INTERLEAVED,
                starts=starts,
                options=(option,) * stages,
                virtual=v,
            )
            seconds = self.record.add(choice)
            if seconds < best:
                best, chosen = seconds, choice
        if chosen is not None:
            self._shift(chosen, best)

    def _shift(self, choice: JointChoice, seconds: float) -> None:
        """Move one cut by one block while that improves."""
        tries, better = 0, True
        while better:
            better = False
            for k in range(1, len(choice.starts)):
                for step in (-1, 1):
                    starts = (*choice.starts[:k], choice.starts[k] + step, *choice.starts[k + 1 :])
                    if not self._rising(starts):
                        continue
                    tries += 1
                    if tries > _SHIFTS or work_seconds() > self.deadline:
                        return
                    moved = JointChoice(
                        microbatches=choice.microbatches,
                        schedule=choice.schedule,
                        starts=starts,
                        options=choice.options,
                        virtual=choice.virtual,
                    )
                    found = self.record.add(moved)
                    if found < seconds * (1 - 1e-12):
                        choice, seconds, better = moved, found, True

    def _rising(self, starts: tuple[int, ...]) -> bool:
        ends = (*starts[1:], len(self.stacked.problem.blocks))
        return all(a < b for a, b in zip(starts, ends, strict=True))
