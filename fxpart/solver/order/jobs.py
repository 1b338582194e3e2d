"""A schedule problem as numbered jobs, and the definition of their start and end times.

The times equal those of :func:`fxpart.schedule.simulate.simulate` with overlapped transfers; a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.schedule.action import Action, ActionKind, Schedule
from fxpart.schedule.dependence import Dependence
from fxpart.schedule.spec import FOUND
from fxpart.solver.order.problem import ScheduleProblem

Orders = list[list[int]]  # by rank its ordered jobs


@dataclass(frozen=True)
class JobTimes:
    """Start and end of each job, and the end of the last one."""

    start: list[float]
    end: list[float]
    seconds: float


class Jobs:
    """Jobs are numbered so that each comes after its dependencies.

    action, seconds, rank: of each job. needs: by job, the jobs whose results it uses. sends: by
    job, the (job, seconds, link) that wait for its transfer, link None on the same rank. before: by
    job, the job of the same stage and kind for the previous microbatch (-1: none). ends_hold: by
    forward job, the job that frees its activations.
    """

    def __init__(self, problem: ScheduleProblem, *, split: bool) -> None:
        """split: split every backward into halves, or none."""
        self.problem = problem
        stages, count = len(problem.stage_rank), problem.microbatches
        pairs = frozenset((k, m) for k in range(stages) for m in range(count) if split)
        self.dependence = Dependence.build(problem.stage_rank, problem.edges, split=pairs)
        back = (ActionKind.I, ActionKind.W) if split else (ActionKind.B,)
        self.action: list[Action] = []
        for m in range(count):
            self.action += [Action(k, ActionKind.F, m) for k in range(stages)]
            self.action += [Action(k, kind, m) for k in reversed(range(stages)) for kind in back]
        self.number = {action: job for job, action in enumerate(self.action)}
        self.rank = [problem.stage_rank[a.stage] for a in self.action]
        self.seconds = [self._seconds(a) for a in self.action]
        self.needs = [[self.number[n] for n in self.dependence.computes(a)] for a in self.action]
        self.sends: list[list[tuple[int, float, tuple[int, int] | None]]] = [
            [] for _ in self.action
        ]
        for job, needs in enumerate(self.needs):
            for need in needs:
                self.sends[need].append(self._sent(need, job))
        self.before = [self._before(a) for a in self.action]
        self.ends_hold = {
            job: self.number[Action(a.stage, back[-1], a.microbatch)]
            for job, a in enumerate(self.action)
            if a.kind is ActionKind.F
        }
        self.frees = {last: first for first, last in self.ends_hold.items()}

    def _seconds(self, action: Action) -> float:
        if action.kind is ActionKind.F:
            return self.problem.forward[action.stage]
        if action.kind is ActionKind.B:
            return self.problem.backward[action.stage]
        assert self.problem.halves is not None
        return self.problem.halves[action.stage][action.kind is ActionKind.W]

    def _sent(self, need: int, job: int) -> tuple[int, float, tuple[int, int] | None]:
        source, target = self.rank[need], self.rank[job]
        if source == target:
            return job, 0.0, None
        stages = sorted((self.action[need].stage, self.action[job].stage))
        return job, self.problem.transfer.get((stages[0], stages[1]), 0.0), (source, target)

    def _before(self, action: Action) -> int:
        if action.microbatch == 0:
            return -1
        return self.number[Action(action.stage, action.kind, action.microbatch - 1)]

    def orders(self, schedule: Schedule) -> Orders:
        """Return a schedule's computations as jobs.

        If backwards are split here, a whole backward becomes its two halves in sequence.
        """
        found: Orders = []
        for actions in schedule.ranks:
            mine = []
            for action in actions:
                if action in self.number:
                    mine.append(self.number[action])
                elif action.kind is ActionKind.B:
                    halves = (
                        Action(action.stage, k, action.microbatch)
                        for k in (ActionKind.I, ActionKind.W)
                    )
                    mine += [self.number[half] for half in halves]
            found.append(mine)
        return found

    def schedule(self, orders: Orders) -> Schedule:
        """Return the computations of an order."""
        lists = tuple(tuple(self.action[job] for job in mine) for mine in orders)
        problem = self.problem
        return Schedule(
            FOUND, len(problem.stage_rank), problem.microbatches, lists, problem.stage_rank
        )

    def timed(self, orders: Orders) -> JobTimes | None:
        """Return the earliest times; None if jobs wait for each other."""
        count = len(self.action)
        waiting = [len(needs) for needs in self.needs]
        ready, start, end = [0.0] * count, [0.0] * count, [0.0] * count
        free, at = [0.0] * len(orders), [0] * len(orders)
        busy: dict[tuple[int, int], float] = {}
        todo, done = list(range(len(orders))), 0
        while todo:
            rank = todo.pop()
            mine = orders[rank]
            while at[rank] < len(mine) and not waiting[mine[at[rank]]]:
                job = mine[at[rank]]
                at[rank] += 1
                done += 1
                start[job] = max(free[rank], ready[job])
                free[rank] = end[job] = start[job] + self.seconds[job]
                for target, seconds, link in self.sends[job]:
                    arrives = end[job]
                    if link is not None:
                        if self.problem.links:
                            arrives = max(arrives, busy.get(link, 0.0))
                            busy[link] = arrives + seconds
                        arrives += seconds
                    ready[target] = max(ready[target], arrives)
                    waiting[target] -= 1
                    if not waiting[target] and self.rank[target] != rank:
                        todo.append(self.rank[target])
        return JobTimes(start, end, max(end)) if done == count else None

    def fits(self, orders: Orders) -> bool:
        """Return whether no rank ever exceeds its memory limit."""
        for rank, mine in enumerate(orders):
            limit = self.problem.limit(rank)
            if limit is None:
                continue
            held = 0
            for job in mine:
                if job in self.ends_hold:
                    held += self.problem.get_activation(self.action[job].stage)
                    if held > limit:
                        return False
                elif job in self.frees:
                    held -= self.problem.get_activation(self.action[job].stage)
        return True


def list_predecessors(jobs: Jobs) -> list[list[tuple[int, float]]]:
    """Return by job what must end before it in every order, and the delay: (job, seconds).

    Its dependencies, the previous microbatch, and, if a stage may have c microbatches in flight,
    the end of the c-th previous one. With one stage on a rank the last is exactly the rank's limit.
    """
    found: list[list[tuple[int, float]]] = [[] for _ in jobs.action]
    for job, sends in enumerate(jobs.sends):
        for target, seconds, _ in sends:
            found[target].append((job, seconds))
    for job, before in enumerate(jobs.before):
        if before >= 0:
            found[job].append((before, 0.0))
    for first, last in jobs.ends_hold.items():
        stage, m = jobs.action[first].stage, jobs.action[first].microbatch
        limit, held = jobs.problem.limit(jobs.rank[first]), jobs.problem.get_activation(stage)
        if limit is None or not held:
            continue
        most = limit // held
        if most and m + most < jobs.problem.microbatches:
            found[jobs.number[Action(stage, ActionKind.F, m + most)]].append((last, 0.0))
    return found


def has_single_stage(problem: ScheduleProblem, rank: int) -> bool:
    """Return whether the rank has one stage."""
    return list(problem.stage_rank).count(rank) == 1
