"""List scheduling: always run the next computation that can start, with priority rules.

Memory is managed by the banker's rule (Dijkstra 1965): a forward starts only if the microbatches in
flight can still end one after the other, oldest first. So the search never deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from fxpart.schedule.action import ActionKind
from fxpart.solver.order.jobs import Jobs, Orders

Priority = Sequence[tuple[float, ...]]  # by job; the smallest comes first


class ListScheduler:
    """Lists the jobs of one problem by any rule."""

    def __init__(self, jobs: Jobs, caps: Sequence[int] | None = None) -> None:
        """caps: by stage the most microbatches in flight, to use less than the available memory."""
        self.jobs, self.caps = jobs, caps
        stages = range(len(jobs.problem.stage_rank))
        # memory of a microbatch on each rank, and the ranks with a limit
        self.whole = [0] * jobs.problem.ranks
        for stage in stages:
            self.whole[jobs.problem.stage_rank[stage]] += jobs.problem.get_activation(stage)
        self.limited = [r for r in range(jobs.problem.ranks) if jobs.problem.limit(r) is not None]

    def run(self, priority: Priority) -> Orders:
        """Return the orders of the ranks.

        Priority decides between jobs that can start at one time.
        """
        state = _ListSchedulerState(self)
        while state.left:
            state.step(priority)
        return state.orders


class _ListSchedulerState:
    """State of a list scheduling run."""

    def __init__(self, lister: ListScheduler) -> None:
        jobs = lister.jobs
        self.lister, self.jobs = lister, jobs
        self.left = len(jobs.action)
        self.orders: Orders = [[] for _ in range(jobs.problem.ranks)]
        self.free = [0.0] * jobs.problem.ranks
        self.ready = [0.0] * self.left
        self.waiting = [
            len(needs) + (before >= 0)
            for needs, before in zip(jobs.needs, jobs.before, strict=True)
        ]
        self.next = [-1] * self.left
        for job, before in enumerate(jobs.before):
            if before >= 0:
                self.next[before] = job
        self.open = {job for job in range(self.left) if not self.waiting[job]}
        self.busy: dict[tuple[int, int], float] = {}
        self.flying = [0] * len(jobs.problem.stage_rank)
        # by microbatch in flight, its memory on each rank
        self.holds: dict[int, list[int]] = {}
        self.owes: dict[int, list[int]] = {}

    def step(self, priority: Priority) -> None:
        """Start one more job: the one that can start first."""
        keys = sorted(
            (max(self.free[self.jobs.rank[job]], self.ready[job]), priority[job], job)
            for job in self.open
        )
        for start, _, job in keys:
            if job not in self.jobs.ends_hold or self._may(job):
                self._start(job, start)
                return
        raise AssertionError("the oldest microbatch can always continue")

    def _may(self, job: int) -> bool:
        """Return whether a forward leaves its rank enough memory for all microbatches, oldest
        first.

        Those that have not begun here count too: in a graph with several sources, a younger one may
        start before them.
        """
        action, problem = self.jobs.action[job], self.jobs.problem
        caps = self.lister.caps
        if caps is not None and self.flying[action.stage] >= caps[action.stage]:
            return False
        rank = self.jobs.rank[job]
        limit = problem.limit(rank)
        if limit is None:
            return True
        held = problem.get_activation(action.stage)
        free = limit - sum(hold[rank] for hold in self.holds.values()) - held
        if free < 0:
            return False
        last = max((m for m, hold in self.holds.items() if hold[rank]), default=0)
        for m in range(max(last, action.microbatch) + 1):
            mine = self.holds[m][rank] if m in self.holds else 0
            owed = self.owes[m][rank] if m in self.owes else self.lister.whole[rank]
            if m == action.microbatch:
                mine, owed = mine + held, owed - held
            if owed > free:
                return False
            free += mine
        return True

    def _start(self, job: int, start: float) -> None:
        jobs, action, rank = self.jobs, self.jobs.action[job], self.jobs.rank[job]
        self.open.discard(job)
        self.left -= 1
        self.orders[rank].append(job)
        end = self.free[rank] = start + jobs.seconds[job]
        if self.next[job] >= 0:
            self._release(self.next[job], 0.0)
        for target, seconds, link in jobs.sends[job]:
            arrives = end
            if link is not None:
                if jobs.problem.links:
                    arrives = max(arrives, self.busy.get(link, 0.0))
                    self.busy[link] = arrives + seconds
                arrives += seconds
            self._release(target, arrives)
        self._hold(job, action.stage, action.microbatch, rank)

    def _release(self, job: int, arrives: float) -> None:
        self.ready[job] = max(self.ready[job], arrives)
        self.waiting[job] -= 1
        if not self.waiting[job]:
            self.open.add(job)

    def _hold(self, job: int, stage: int, microbatch: int, rank: int) -> None:
        """Update the memory that the job allocates or frees."""
        held = self.jobs.problem.get_activation(stage)
        if job in self.jobs.ends_hold:
            self.flying[stage] += 1
            ranks = range(self.jobs.problem.ranks)
            self.holds.setdefault(microbatch, [0 for _ in ranks])[rank] += held
            self.owes.setdefault(microbatch, list(self.lister.whole))[rank] -= held
        elif job in self.jobs.frees:
            self.flying[stage] -= 1
            self.holds[microbatch][rank] -= held


def rules(jobs: Jobs, tail: Sequence[float]) -> list[Priority]:
    """Return the priority rules.

    By the longest path after a job, backward first, forward first; each with microbatches ascending
    before or after that criterion, and W's last.
    """
    first = {
        "path": dict.fromkeys(ActionKind, 0),
        "back": {ActionKind.B: 0, ActionKind.I: 0, ActionKind.F: 1, ActionKind.W: 2},
        "ahead": {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 1, ActionKind.W: 2},
        "late": {ActionKind.F: 0, ActionKind.B: 0, ActionKind.I: 0, ActionKind.W: 1},
    }
    found: list[Priority] = []
    for kinds, by_microbatch in product(first.values(), (False, True)):
        found.append(
            [
                (kinds[a.kind], a.microbatch if by_microbatch else 0, -tail[job])
                for job, a in enumerate(jobs.action)
            ]
        )
    return found


def list_in_flight_caps(jobs: Jobs) -> list[list[int]]:
    """Return caps on microbatches in flight: as many as the busiest rank processes, and more.

    By Little's law a stage needs as many in flight as the busiest rank processes between a
    microbatch's forward and its backward on the stage.
    """
    problem = jobs.problem
    work = [0.0] * problem.ranks
    for stage, rank in enumerate(problem.stage_rank):
        work[rank] += problem.forward[stage] + problem.backward[stage]
    pace = max(work) or 1.0
    away = [0.0] * len(problem.stage_rank)
    for stage in reversed(range(len(away))):
        beyond = [
            away[e.target] + 2 * problem.transfer.get((e.source, e.target), 0.0)
            for e in problem.edges
            if e.source == stage
        ]
        away[stage] = problem.forward[stage] + problem.backward[stage] + max(beyond, default=0.0)
    return [[max(1, -int(-a // pace) + more) for a in away] for more in (0, 1, 2)]
