"""Select among schedules that do not determine the cuts, and virtual stages.

The cuts of a mesh are selected by the closed form of 1F1B and GPipe. Other schedules are used on
request: the best stages under 1F1B are kept (ZB-H1, and orders found by the schedule solver), or
each rank's share is split into balanced virtual stages (interleaved 1F1B, breadth-first, ZB-V). All
are compared by their simulated step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.plan.model import Plan
from fxpart.planner.execution_mode import ASYNC
from fxpart.planner.families.searched_schedule import with_searched_schedule
from fxpart.planner.families.virtual_stages import VirtualStageChoice
from fxpart.planner.plan_builder import ShardingSummary
from fxpart.planner.prediction.schedule_change import (
    change_schedule,
    find_overfull_ranks,
    predict_schedule,
)
from fxpart.planner.refinement import plan_seconds
from fxpart.schedule.dependence import chain
from fxpart.schedule.make import make_unverified
from fxpart.schedule.simulate import simulate
from fxpart.schedule.spec import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    ScheduleSpec,
    find_built,
    list_schedules,
)
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Recompute, Solution
from fxpart.solver.stage_graph.stage_partition import StagePartition

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.planner.plan_family import MeshContext
    from fxpart.planner.request import PlanRequest

_SECONDS = 2.0  # solver time limit for one number of virtual stages
_SEARCH = 5.0  # solver time limit for an order of actions, in seconds

# Make the plan of a solution with its generated program, and the program of a choice.
Make = Callable[[StagePartition, Solution], tuple["Plan", "GeneratedProgram"]]
MakeParts = Callable[..., "GeneratedProgram"]


def requested_schedules(request: PlanRequest) -> tuple[str, ...]:
    """Return the requested schedules, by default all that compete."""
    if "schedule" not in request.constraints:
        return list_schedules(competes=True)
    names = str(request.constraints["schedule"]).split(",")
    return tuple(name.strip() for name in names)


def keep_cut_schedules(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the schedules by which cuts are selected; 1F1B where there is none among these."""
    return tuple(name for name in names if chooses_cuts(name)) or (DEFAULT_SCHEDULE,)


def chooses_cuts(name: str) -> bool:
    """Return whether cuts are selected by the schedule's closed form."""
    spec = find_built(name)
    return spec is not None and spec.chooses_cuts


def with_cut_schedules(
    constraints: Mapping[str, int | float | str | bool],
) -> dict[str, int | float | str | bool]:
    """Return constraints with schedules by which degrees can be selected."""
    if "schedule" not in constraints:
        return dict(constraints)
    names = tuple(name.strip() for name in str(constraints["schedule"]).split(","))
    if names == (ASYNC,):
        return dict(constraints)
    return {**constraints, "schedule": ",".join(keep_cut_schedules(names))}


@dataclass(frozen=True)
class ScheduleSelector:
    """Tries the requested schedules on one priced mesh.

    make, parts: return plan and program of a choice. shared: how the ranks of a stage share its
    work. time_limit: seconds for one search.
    """

    problem: PartitionProblem
    request: PlanRequest
    make: Make
    parts: MakeParts
    shared: ShardingSummary | None
    time_limit: float

    def best(self, plan: Plan, parts: GeneratedProgram) -> tuple[Plan, GeneratedProgram]:
        """Return the requested schedule with the shortest simulated step.

        plan, parts: the best under 1F1B or GPipe. Raises FXP204 where no requested schedule fits.
        """
        names = requested_schedules(self.request)
        found = [(plan, parts)] if plan.schedule in names else []
        full: list[Plan] = []
        for made in (*self._reorder(names, plan, parts), *self._split_stages(names)):
            if find_overfull_ranks(made[0]):
                full.append(made[0])
            else:
                found.append(made)
        if not found:
            raise _explain_unfit(full) if full else self._explain_too_few_blocks(names)
        model = self.request.cost_model
        return min(found, key=lambda made: plan_seconds(made[0], model))

    def _reorder(
        self, names: tuple[str, ...], plan: Plan, parts: GeneratedProgram
    ) -> Iterator[tuple[Plan, GeneratedProgram]]:
        """Yield the plan's stages under the other requested schedules."""
        bound = compute_work_bound(self.problem)
        for name, spec in _in_table_order(names):
            if spec.build is None:
                limit = min(self.time_limit, _SEARCH)
                seed = self.request.seed
                yield with_searched_schedule(plan, self.problem, bound, limit, seed), parts
            elif not (spec.is_virtual or spec.chooses_cuts or not spec.flushes):
                yield change_schedule(plan, name, bound), parts

    def _split_stages(self, names: tuple[str, ...]) -> Iterator[tuple[Plan, GeneratedProgram]]:
        """Yield the best virtual stages for each requested schedule and number of ranks."""
        virtual = self.request.constraints.get("virtual", 2)
        for name in names:
            spec = SCHEDULES[name]
            if not spec.is_virtual:
                continue
            for ranks in self._counts():
                turns = spec.count_stages_per_rank(int(virtual))
                for mode in self.problem.recompute:  # one mode for all, the fastest that fits
                    made = self._cut(name, ranks, turns, mode)
                    if made is not None:
                        yield made
                        if not find_overfull_ranks(made[0]):
                            break

    def _counts(self) -> list[int]:
        """Return the numbers of stages to try: all if few, else halves of the largest."""
        least, most = max(2, self.problem.min_stages), self.problem.max_stages
        if most - least < 4:
            return list(range(least, most + 1))
        found = [most]
        while found[-1] // 2 >= least:
            found.append(found[-1] // 2)
        return found

    def _cut(
        self, name: str, ranks: int, turns: int, mode: Recompute
    ) -> tuple[Plan, GeneratedProgram] | None:
        """Return the best plan with ``turns`` virtual stages per rank; None if too few blocks.

        mode: of recomputation, on all of them.
        """
        places = SCHEDULES[name].assign_ranks(ranks, turns)
        problem = make_virtual_stage_problem(self.problem, places)
        problem = msgspec.structs.replace(problem, recompute=(mode,))
        best: tuple[float, PartitionChoice] | None = None
        for variant in range(len(problem.variants)):
            alone = msgspec.structs.replace(problem, variants=(problem.variants[variant],))
            answer = solve(alone, time_limit=_SECONDS, seed=self.request.seed).choice
            if answer is None:
                continue
            choice = msgspec.structs.replace(answer, variant=variant)
            seconds = self._seconds(problem, choice, name, places)
            if best is None or seconds < best[0]:
                best = seconds, choice
        return None if best is None else self._plan(problem, best[1], name, places)

    def _seconds(
        self, problem: PartitionProblem, choice: PartitionChoice, name: str, places: tuple[int, ...]
    ) -> float:
        """Return the simulated step time, as if each virtual stage fed the next."""
        named = msgspec.structs.replace(choice, schedule=name)
        stages = PartitionScorer(problem).evaluate(named).stages
        edges = chain(len(stages))
        count = problem.variants[choice.variant].microbatches
        return simulate(
            make_unverified(name, places, count, edges), edges,
            [s.forward_seconds for s in stages], [s.backward_seconds for s in stages],
        ).step_seconds  # fmt: skip

    def _plan(
        self, problem: PartitionProblem, choice: PartitionChoice, name: str, places: tuple[int, ...]
    ) -> tuple[Plan, GeneratedProgram]:
        """Return the plan of virtual stages: the plan of as many whole stages, split further."""
        ranks = max(places) + 1
        whole = msgspec.structs.replace(self.problem, min_stages=ranks, max_stages=ranks)
        starts = choice.starts[:: len(places) // ranks]
        base, _ = self.make(*_as_solution(whole, msgspec.structs.replace(choice, starts=starts)))
        count = problem.variants[choice.variant].microbatches
        again = () if problem.recompute == ("none",) else tuple(range(len(places)))
        parts = self.parts(choice, microbatches=count, recomputing=again)
        split = VirtualStageChoice(problem, choice, name, places, parts.spec, self.shared)
        plan = split.onto(base)
        return predict_schedule(
            plan, split.schedule, split.rows(base), compute_work_bound(self.problem)
        ), parts

    def _explain_too_few_blocks(self, names: tuple[str, ...]) -> FxpartError:
        where = f"schedule={','.join(names)}"
        if self.problem.max_stages < 2:
            return error(
                "FXP202",
                where=where,
                why="virtual stages need a pipeline of at least 2 ranks (or meshes), and the "
                "constraints and the cluster leave 1",
                fix=f"use at least 2 stages, or schedule={DEFAULT_SCHEDULE}",
            )
        cuts = len(self.problem.blocks) - len(set(self.problem.no_cut_after))
        return error(
            "FXP202",
            where=where,
            why=f"the model can be cut into at most {cuts} virtual stages, on "
            f"{self.problem.min_stages} to {self.problem.max_stages} ranks",
            fix=f"use fewer (virtual) stages, or schedule={DEFAULT_SCHEDULE}; "
            "granularity=op allows more cuts",
        )


def _in_table_order(names: tuple[str, ...]) -> list[tuple[str, ScheduleSpec]]:
    """Return the requested schedules in registry order, so that ties do not depend on theirs."""
    return [(name, spec) for name, spec in SCHEDULES.items() if name in names]


def make_virtual_stage_problem(
    problem: PartitionProblem, places: tuple[int, ...]
) -> PartitionProblem:
    """Return the problem of cutting the blocks into virtual stages, each on its rank's device.

    Each virtual stage alone must fit its device; the memory of all of a rank's is checked once
    their schedule is known. Inputs of the second and later virtual stages of a rank are priced by
    the slowest link.
    """
    latency = max(d.latency for d in problem.devices)
    inverse = max(d.inverse_bandwidth for d in problem.devices)
    devices = tuple(
        msgspec.structs.replace(
            problem.devices[rank],
            latency=latency if position > max(places) else problem.devices[rank].latency,
            inverse_bandwidth=inverse
            if position > max(places)
            else problem.devices[rank].inverse_bandwidth,
        )
        for position, rank in enumerate(places)
    )
    return msgspec.structs.replace(
        problem,
        devices=devices,
        schedules=(DEFAULT_SCHEDULE,),
        min_stages=len(places),
        max_stages=len(places),
    )


def compute_work_bound(problem: PartitionProblem) -> float:
    """Return a lower bound of the step time, in seconds, for any cuts, counts and schedule.

    Every rank computes at most all the time, on the fastest of the devices; and a microbatch passes
    forward and backward through all blocks.
    """
    found = []
    for variant in problem.variants:
        each = [
            min(f[b] + g[b] for f, g in zip(variant.forward, variant.backward, strict=True))
            for b in range(len(problem.blocks))
        ]
        once = [min(row[b] for row in problem.step) for b in range(len(problem.blocks))]
        work = fsum((variant.microbatches * fsum(each), fsum(once)))
        found.append(max(work / problem.max_stages, fsum(each)))
    return min(found)


def _as_solution(
    problem: PartitionProblem, choice: PartitionChoice
) -> tuple[StagePartition, Solution]:
    """Return a choice as a solver's solution."""
    seconds = PartitionScorer(problem).evaluate(choice).seconds
    answer = Solution(
        status="best found",
        choice=choice,
        objective=seconds,
        bound=0.0,
        solver="dp",
        candidates=(choice,),
    )
    return StagePartition(problem, answer), answer


def _explain_unfit(plans: list[Plan]) -> FxpartError:
    """Return the error for the plan that exceeds its memory by the smallest factor."""
    worst = [max(find_overfull_ranks(p), key=lambda r: r.tensors - r.memory_limit) for p in plans]
    plan, row = min(zip(plans, worst, strict=True), key=lambda f: f[1].tensors / f[1].memory_limit)
    return error(
        "FXP204",
        where=f"schedule={plan.schedule}, stage {row.stage}",
        why=f"the stage needs {row.tensors} bytes with {row.in_flight} microbatches in flight, "
        f"but {row.memory_limit} are available",
        fix=f"use schedule={DEFAULT_SCHEDULE}, which has fewer in flight, more microbatches, "
        "or more ranks",
    )


class ScheduleSelectionFamily:
    """Plans under schedules that do not determine the cuts, on one mesh."""

    name = "schedule selection"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None where such a schedule is requested."""
        if all(map(chooses_cuts, requested_schedules(request))):
            return "the requested schedules determine the cuts"
        return None

    def plan(self, context: MeshContext) -> tuple[Plan, GeneratedProgram]:
        """Return the best of the requested schedules."""
        best = context.chain()
        selector = ScheduleSelector(
            context.problem, context.request, context.make, context.parts, context.shared(),
            context.time_limit,
        )  # fmt: skip
        return selector.best(*best)


SCHEDULE_SELECTION = ScheduleSelectionFamily()
