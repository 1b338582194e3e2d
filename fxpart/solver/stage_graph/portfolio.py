"""Entry point of stage graphs: stages of parallel branches that are faster than a chain."""

from __future__ import annotations

from math import fsum, inf

import msgspec

from fxpart.errors import error
from fxpart.solver.bounds import cheap_bound
from fxpart.solver.objective import evaluate as evaluate_chain
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.schedule_costs import has_graph_form
from fxpart.solver.solution import status_of
from fxpart.solver.stage_graph.block_graph import BlockGraph, members, regroup
from fxpart.solver.stage_graph.coarsen import Groups, coarsen_blocks, fuse_uncut_blocks
from fxpart.solver.stage_graph.objective import convert_chain_choice, evaluate
from fxpart.solver.stage_graph.problem import StageGraphChoice, StageGraphSolution
from fxpart.solver.stage_graph.search import improve
from fxpart.solver.stage_graph.series_parallel import series_parallel
from fxpart.solver.stage_graph.tables import StageGraphTables
from fxpart.solver.stage_graph.topological_orders import solve_chains
from fxpart.solver.validate import check_problem
from fxpart.solver.work import work_seconds

_ROUNDING = 1e-12  # relative; the terms below are rounded sums

MOST_GROUPS = 32  # groups of blocks in the search and in CP-SAT
_MOVES = 6  # moves from each of the best starts, times the groups squared
_STARTS = 3
_EFFORT = 0.1  # CP-SAT's deterministic time per second of the limit: it ends well before
_GAIN = 1e-9  # relative improvement below which a plan is not better
_REFINED = 256  # blocks up to which the best plan's single blocks are moved again


def accepts(problem: PartitionProblem) -> str | None:
    """Return why stage graphs cannot be better than chains here; None if they may be."""
    if problem.max_stages < 2:
        return "there is only one stage"
    if not any(map(has_graph_form, problem.schedules)):
        return "no schedule has a closed form for graphs of stages"
    if not BlockGraph.of(problem).branches:
        return "no two blocks could run in parallel"
    return None


def solve_branches(
    problem: PartitionProblem,
    incumbent: PartitionChoice | None = None,
    *,
    time_limit: float = 30.0,
    seed: int = 0,
) -> StageGraphSolution | None:
    """Return the best stage graph found within ``time_limit`` seconds, and a proven bound.

    incumbent: the best known chain, whose seconds by the chain objective are to be beaten; None if
    no chain fits. Schedules without a closed form for graphs are not searched. Returns None if
    there are no branches, if nothing fits, and if nothing is better. Equal problems give equal
    results if the time limit is not reached. Raises FXP206 for an invalid problem, FXP109 for a
    negative time limit.
    """
    deadline = work_seconds() + time_limit
    if not time_limit >= 0:
        raise error(
            "FXP109",
            where=f"solve_branches(time_limit={time_limit!r})",
            why="The time limit is negative.",
            fix="Use a time limit of at least 0 seconds.",
        )
    check_problem(problem)
    if accepts(problem) is not None:
        return None
    whole = problem
    names = tuple(filter(has_graph_form, problem.schedules))
    problem = msgspec.structs.replace(whole, schedules=names)
    record = _StageGraphIncumbent(problem)
    beat = inf
    if incumbent is not None:
        chain = evaluate_chain(whole, incumbent)
        beat = chain.seconds if chain.feasible else inf
        record.add(convert_chain_choice(problem, incumbent), "chain")
    bound = _StageGraphPortfolio(problem, record, deadline, seed).solve(_EFFORT * time_limit)
    if record.choice is None or not record.seconds < beat * (1 - _GAIN):
        return None
    bound = min(bound, record.seconds)
    return StageGraphSolution(
        status=status_of(record.seconds, bound),
        choice=record.choice,
        objective=record.seconds,
        bound=bound,
        solver=record.solver,
        over=(
            f"acyclic graphs of stages of these {len(problem.blocks)} blocks on at most "
            f"{problem.max_stages} of {len(problem.devices)} devices"
        ),
    )


class _StageGraphIncumbent:
    """The best choice found."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self.seconds, self.solver = inf, ""
        self.choice: StageGraphChoice | None = None

    def add(self, choice: StageGraphChoice, solver: str) -> None:
        """Store the choice if it fits and is better."""
        found = evaluate(self.problem, choice)
        if found.feasible and found.seconds < self.seconds * (1 - _GAIN):
            self.choice, self.seconds, self.solver = choice, found.seconds, solver


class _StageGraphPortfolio:
    """Heuristics over groups of blocks, then CP-SAT for each variant and schedule."""

    def __init__(
        self, problem: PartitionProblem, record: _StageGraphIncumbent, deadline: float, seed: int
    ) -> None:
        self.problem, self.record = problem, record
        self.deadline, self.seed = deadline, seed
        self.groups: Groups = coarsen_blocks(problem, MOST_GROUPS)
        self.small = regroup(problem, self.groups)
        self.graph = BlockGraph.of(self.small)
        closed = {*problem.no_cut_after} - {len(problem.blocks) - 1}
        self.whole = len(self.groups) == len(problem.blocks) - len(closed)
        graph = BlockGraph.of(problem)
        self.cheap = [branch_bound(problem, v, graph) for v in range(len(problem.variants))]

    def solve(self, effort: float) -> float:
        """Fill the record.

        Return a bound in seconds on every choice. effort: CP-SAT's, in total.
        """
        branches = sorted(
            (self.cheap[v], v, s)
            for v in range(len(self.problem.variants))
            for s in range(len(self.problem.schedules))
        )
        made: dict[tuple[int, str], list[list[int]]] = {}
        self._chains(made)
        self._heuristics(made, branches)
        self._refine()
        bound = inf
        for index, (cheap, v, s) in enumerate(branches):
            if cheap >= self.record.seconds * (1 - _GAIN):
                bound = min(bound, cheap)
                continue
            share = effort / (len(branches) - index)
            proven, used = self._prove(v, self.problem.schedules[s], made, share)
            effort -= used
            bound = min(bound, max(cheap, proven) if self.whole else cheap)
        return bound

    def _tables(self, variant: int, schedule: str) -> StageGraphTables:
        return StageGraphTables(self.small, variant, schedule, self.graph)

    def _tell(self, tables: StageGraphTables, stages: list[int], solver: str) -> None:
        """Evaluate stages of groups as stages of blocks."""
        home = tables.choice(stages).stage_of
        stage_of = {b: home[g] for g, group in enumerate(self.groups) for b in group}
        self.record.add(
            StageGraphChoice(
                variant=tables.index,
                schedule=tables.schedule,
                stage_of=tuple(stage_of[b] for b in range(len(stage_of))),
            ),
            solver,
        )

    def _chains(self, made: dict[tuple[int, str], list[list[int]]]) -> None:
        """Yield chains over several orders, as first stages for each variant and schedule."""
        limit = work_seconds() + (self.deadline - work_seconds()) * 0.25
        for choice, order in solve_chains(self.small, self.graph, limit, self.seed):
            ends = (*choice.starts[1:], len(order))
            stages = [
                sum(1 << b for b in order[a:z]) for a, z in zip(choice.starts, ends, strict=True)
            ]
            made.setdefault((choice.variant, choice.schedule), []).append(stages)
            self._tell(self._tables(choice.variant, choice.schedule), stages, "chain")

    def _heuristics(
        self,
        made: dict[tuple[int, str], list[list[int]]],
        branches: list[tuple[float, int, int]],
    ) -> None:
        """Search series-parallel splits, then small moves from the best starts."""
        limit = work_seconds() + (self.deadline - work_seconds()) * 0.4
        for cheap, v, s in branches:
            schedule = self.problem.schedules[s]
            if cheap >= self.record.seconds * (1 - _GAIN):
                continue
            tables = self._tables(v, schedule)
            starts = made.setdefault((v, schedule), [])
            for stages in series_parallel(tables, limit):
                if len(stages) >= self.problem.min_stages:
                    starts.append(stages)
                    self._tell(tables, stages, "series-parallel")
            starts.sort(key=tables.judge)
            moves = _MOVES * len(self.groups) ** 2
            for stages in list(starts[:_STARTS]):
                better = improve(tables, stages, moves=moves, seed=self.seed, deadline=limit)
                starts.append(better)
                self._tell(tables, better, "moves")
            starts.sort(key=tables.judge)

    def _prove(
        self,
        variant: int,
        schedule: str,
        made: dict[tuple[int, str], list[list[int]]],
        effort: float,
    ) -> tuple[float, float]:
        """Run CP-SAT on one variant and schedule.

        Return its bound in seconds, and the effort used.
        """
        tables = self._tables(variant, schedule)
        starts = made.get((variant, schedule), [])
        left = self.deadline - work_seconds()
        if left <= 0 or effort <= 0:
            return 0.0, 0.0
        from fxpart.solver.stage_graph.stage_graph_ilp import solve_depth_model

        found = solve_depth_model(
            tables,
            starts[0] if starts and not tables.judge(starts[0])[0] else None,
            best=self.record.seconds,
            seconds=left,
            effort=effort,
            seed=self.seed,
        )
        if found.stages is not None:
            self._tell(tables, found.stages, "cp-sat")
        return found.bound, found.effort

    def _refine(self) -> None:
        """Refine the best choice's variant over single blocks, if groups had several."""
        choice = self.record.choice
        if self.whole or choice is None or len(self.problem.blocks) > _REFINED:
            return
        groups = fuse_uncut_blocks(self.problem)
        small = regroup(self.problem, groups)
        tables = StageGraphTables(small, choice.variant, choice.schedule, BlockGraph.of(small))
        stages = [0] * choice.stages
        for g, group in enumerate(groups):
            stages[choice.stage_of[group[0]]] |= 1 << g
        limit = work_seconds() + (self.deadline - work_seconds()) * 0.5
        starts = [stages, *series_parallel(tables, limit)]
        starts = [s for s in starts if len(s) >= self.problem.min_stages]
        moves = _MOVES * MOST_GROUPS**2
        moved = improve(
            tables, min(starts, key=tables.judge), moves=moves, seed=self.seed, deadline=limit
        )
        home = {b: k for k, gs in enumerate(moved) for g in members(gs) for b in groups[g]}
        stage_of = tuple(home[b] for b in range(len(home)))
        self.record.add(
            StageGraphChoice(variant=choice.variant, schedule=choice.schedule, stage_of=stage_of),
            "moves",
        )


def branch_bound(problem: PartitionProblem, variant: int, graph: BlockGraph) -> float:
    """Return a lower bound in seconds on all acyclic stage graphs of ``variant``.

    The longest path of stages takes at least as long as the longest path of blocks, each on its
    fastest device; the longest load is bounded as in a chain (work over speed, largest unit).
    """
    one = problem.variants[variant]
    kinds = sorted({d.type for d in problem.devices[: problem.max_stages]})
    rows = [[f + b for f, b in zip(one.forward[k], one.backward[k], strict=True)] for k in kinds]
    fastest = [min(costs) for costs in zip(*rows, strict=True)]
    tail = list(fastest)
    for b in reversed(range(len(fastest))):
        tail[b] += max((tail[c] for c in members(graph.after[b])), default=0.0)
    load = max(problem.once, cheap_bound(problem, variant) - fsum(fastest))
    path: float = max(tail)
    return (path + load) * (1 - _ROUNDING)
