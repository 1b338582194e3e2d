"""Schedules beyond 1F1B and GPipe: other orders for the same stages, or stages of several pieces.

The cuts of a mesh are chosen by a closed form that 1F1B and GPipe share. Other schedules are wished
for by name; then the stages that are best under 1F1B are taken as they are (ZB-H1, and orders that
a solver finds), or each rank's share is cut into pieces that are balanced among each other
(interleaved 1F1B, breadth-first, ZB-V). All are compared by their simulated step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.plan.model import Plan
from fxpart.plan.prediction import RankPrediction
from fxpart.plan.schedule import edges_of, stage_of
from fxpart.planner.execution_mode import ASYNC
from fxpart.planner.families.virtual_stages import VirtualStageChoice
from fxpart.planner.plan_builder import ShardingSummary
from fxpart.planner.prediction.schedule_change import (
    change_schedule,
    find_overfull_ranks,
    predict_schedule,
)
from fxpart.planner.prediction.step_simulation import StageTimes
from fxpart.schedule.dependence import chain
from fxpart.schedule.make import make_unverified
from fxpart.schedule.plan_actions import format_plan_actions
from fxpart.schedule.simulate import simulate
from fxpart.schedule.spec import DEFAULT_SCHEDULE, FOUND, SCHEDULES, ScheduleSpec, find_built
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.order.problem import ScheduleProblem
from fxpart.solver.order.search import search_schedule
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.stage_graph.stage_partition import StagePartition

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.codegen.generated_program import GeneratedProgram
    from fxpart.planner.plan_family import MeshContext
    from fxpart.planner.request import PlanRequest

_SECONDS = 2.0  # for cutting one number of pieces
_SEARCH = 5.0  # for an order of computations

# A plan of a solver's answer and its program's parts; the parts of a choice alone.
Make = Callable[[StagePartition, Solution], tuple["Plan", "GeneratedProgram"]]
MakeParts = Callable[..., "GeneratedProgram"]


def requested_schedules(request: PlanRequest) -> tuple[str, ...]:
    """The schedules asked for, by default 1F1B."""
    words = str(request.constraints.get("schedule", DEFAULT_SCHEDULE)).split(",")
    return tuple(word.strip() for word in words)


def keep_cut_schedules(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of these the schedules by which cuts are chosen; 1F1B where there is none."""
    return tuple(name for name in names if chooses_cuts(name)) or (DEFAULT_SCHEDULE,)


def chooses_cuts(name: str) -> bool:
    """Whether cuts are chosen under the schedule, by its closed form."""
    spec = find_built(name)
    return spec is not None and spec.chooses_cuts


def with_cut_schedules(
    constraints: Mapping[str, int | float | str | bool],
) -> dict[str, int | float | str | bool]:
    """Wishes with the schedules by which degrees are chosen in the place of others."""
    if "schedule" not in constraints:
        return dict(constraints)
    words = tuple(word.strip() for word in str(constraints["schedule"]).split(","))
    if words == (ASYNC,):
        return dict(constraints)
    return {**constraints, "schedule": ",".join(keep_cut_schedules(words))}


@dataclass(frozen=True)
class ScheduleSelector:
    """What the wished schedules are tried on.

    problem: priced, for one mesh. make, parts: of a choice. shared: how the ranks of a stage share
    it. time_limit: seconds for one search.
    """

    problem: PartitionProblem
    request: PlanRequest
    make: Make
    parts: MakeParts
    shared: ShardingSummary | None
    time_limit: float

    def best(self, plan: Plan, parts: GeneratedProgram) -> tuple[Plan, GeneratedProgram]:
        """Of the wished schedules the one whose simulated step is shortest.

        plan, parts: the best under 1F1B or GPipe. Raises FXP204 where no wished schedule fits.
        """
        names = requested_schedules(self.request)
        found = [(plan, parts)] if plan.schedule in names else []
        full: list[Plan] = []
        for made in (*self._same(names, plan, parts), *self._pieces(names)):
            if find_overfull_ranks(made[0]):
                full.append(made[0])
            else:
                found.append(made)
        if not found:
            raise _unfit(full) if full else self._too_few(names)
        return min(found, key=lambda made: made[0].prediction.expected_seconds)

    def _same(
        self, names: tuple[str, ...], plan: Plan, parts: GeneratedProgram
    ) -> Iterator[tuple[Plan, GeneratedProgram]]:
        """Other orders for the stages that there are."""
        bound = work_bound(self.problem)
        for name, spec in _in_table_order(names):
            if spec.build is None:
                limit = min(self.time_limit, _SEARCH)
                yield with_searched_schedule(plan, bound, limit, self.request.seed), parts
            elif not (spec.is_virtual or spec.chooses_cuts or not spec.flushes):
                yield change_schedule(plan, name, bound), parts

    def _pieces(self, names: tuple[str, ...]) -> Iterator[tuple[Plan, GeneratedProgram]]:
        """For each wished schedule and number of ranks the best cut into pieces."""
        wish = self.request.constraints.get("virtual", 2)
        for name in names:
            spec = SCHEDULES[name]
            if not spec.is_virtual:
                continue
            for ranks in self._counts():
                turns = spec.count_turns(int(wish))
                made = self._cut(name, ranks, turns)
                if made is not None:
                    yield made

    def _counts(self) -> list[int]:
        """Numbers of stages to try: all of a few, else halves of the largest."""
        least, most = max(2, self.problem.min_stages), self.problem.max_stages
        if most - least < 4:
            return list(range(least, most + 1))
        found = [most]
        while found[-1] // 2 >= least:
            found.append(found[-1] // 2)
        return found

    def _cut(self, name: str, ranks: int, turns: int) -> tuple[Plan, GeneratedProgram] | None:
        """The best plan of ``turns`` pieces on each of so many ranks; None where blocks lack."""
        places = SCHEDULES[name].assign_ranks(ranks, turns)
        problem = in_pieces(self.problem, places)
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
        """The simulated step, as if each piece fed the next."""
        stages = PartitionScorer(problem).evaluate(choice).stages
        edges = chain(len(stages))
        count = problem.variants[choice.variant].microbatches
        return simulate(
            make_unverified(name, places, count, edges), edges,
            [s.forward_seconds for s in stages], [s.backward_seconds for s in stages],
        ).step_seconds  # fmt: skip

    def _plan(
        self, problem: PartitionProblem, choice: PartitionChoice, name: str, places: tuple[int, ...]
    ) -> tuple[Plan, GeneratedProgram]:
        """The plan of a choice of pieces: that of as many whole stages, with the pieces in it."""
        ranks = max(places) + 1
        whole = msgspec.structs.replace(self.problem, min_stages=ranks, max_stages=ranks)
        starts = choice.starts[:: len(places) // ranks]
        base, _ = self.make(*_given(whole, msgspec.structs.replace(choice, starts=starts)))
        count = problem.variants[choice.variant].microbatches
        parts = self.parts(choice, microbatches=count)
        folded = VirtualStageChoice(problem, choice, name, places, parts.spec, self.shared)
        plan = folded.onto(base)
        return predict_schedule(
            plan, folded.schedule, folded.rows(base), work_bound(self.problem)
        ), parts

    def _too_few(self, names: tuple[str, ...]) -> FxpartError:
        cuts = len(self.problem.blocks) - len(set(self.problem.no_cut_after))
        return error(
            "FXP202",
            where=f"schedule={','.join(names)}",
            why=f"the model can be cut into {cuts} pieces at most, on "
            f"{self.problem.min_stages} to {self.problem.max_stages} ranks",
            fix=f"fewer stages or pieces, or schedule={DEFAULT_SCHEDULE}; "
            "granularity=op cuts finer",
        )


def _in_table_order(names: tuple[str, ...]) -> list[tuple[str, ScheduleSpec]]:
    """The requested schedules in the order of the table, so that ties do not depend on theirs."""
    return [(name, spec) for name, spec in SCHEDULES.items() if name in names]


def in_pieces(problem: PartitionProblem, places: tuple[int, ...]) -> PartitionProblem:
    """The problem of cutting the blocks into so many pieces, each on its rank's device.

    Each piece is only held to its device's whole memory; what a rank's pieces need together is
    looked at when their schedule is known. Pieces of later turns come from the slowest link.
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


def work_bound(problem: PartitionProblem) -> float:
    """Seconds that a step takes at least, whatever its cuts, counts and schedule.

    Every rank computes at most all the time, on the fastest of the devices; and a microbatch goes
    forth and back through all blocks.
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


def _given(problem: PartitionProblem, choice: PartitionChoice) -> tuple[StagePartition, Solution]:
    """A choice as if a solver had answered with it."""
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


def _unfit(plans: list[Plan]) -> FxpartError:
    """What is too full in the plan that is nearest to fitting."""
    worst = [max(find_overfull_ranks(p), key=lambda r: r.tensors - r.memory_limit) for p in plans]
    plan, row = min(zip(plans, worst, strict=True), key=lambda f: f[1].tensors / f[1].memory_limit)
    return error(
        "FXP204",
        where=f"schedule={plan.schedule}, stage {row.stage}",
        why=f"{row.tensors} bytes are needed with {row.in_flight} microbatches in flight, "
        f"{row.memory_limit} are there",
        fix=f"schedule={DEFAULT_SCHEDULE} keeps less in flight; or more microbatches, "
        "or more ranks",
    )


def with_searched_schedule(plan: Plan, bound: float, time_limit: float, seed: int) -> Plan:
    """The plan with the best order found for its stages, of one piece each.

    Backwards are split in two halves of the same seconds. bound: seconds below which no schedule
    of any cuts can end a step. What is proven of the order itself, given these stages, is told in
    the plan's ``provenance``. Raises FXP204 where a rank cannot hold one microbatch.
    """
    edges, rows = edges_of(plan), plan.prediction.ranks
    times = StageTimes.of(rows, edges, stage_of(plan))
    firsts = {row.stage: row for row in reversed(rows)}
    mine = [firsts[stage] for stage in range(len(plan.stages))]
    each = [_each(row) for row in mine]
    found = search_schedule(
        ScheduleProblem(
            stage_rank=stage_of(plan),
            microbatches=plan.microbatches,
            edges=edges,
            forward=times.forward,
            backward=times.backward,
            halves=tuple((seconds / 2, seconds / 2) for seconds in times.backward),
            transfer=times.transfer,
            activation=tuple(each),
            memory=tuple(_room(row, held) for row, held in zip(mine, each, strict=True)),
        ),
        time_limit=time_limit,
        seed=seed,
    )
    made = change_schedule(plan, FOUND, bound, format_plan_actions(found.schedule))
    told = f"found by {found.solver}; {found.status} for these stages (gap {100 * found.gap:.1f} %)"
    return msgspec.structs.replace(made, provenance={**made.provenance, "schedule": told})


def _each(row: RankPrediction) -> int:
    """Bytes that a stage holds for one microbatch in flight."""
    memory = row.memory
    return (memory.activations - row.workspace + memory.transfers) // max(row.in_flight, 1)


def _room(row: RankPrediction, each: int) -> int:
    """Bytes that microbatches in flight may take; never less than one needs."""
    memory = row.memory
    fixed = memory.total - memory.activations - memory.transfers + row.workspace
    return max(row.memory_limit - fixed, each)


class OtherSchedulesFamily:
    """Plans under schedules by which no cuts are chosen, on one mesh."""

    name = "other schedules"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None where such a schedule is requested."""
        if all(map(chooses_cuts, requested_schedules(request))):
            return "cuts are chosen by the requested schedules"
        return None

    def plan(self, context: MeshContext) -> tuple[Plan, GeneratedProgram]:
        """Return the best of the requested schedules."""
        best = context.chain()
        selector = ScheduleSelector(
            context.problem, context.request, context.make, context.parts, context.shared(),
            context.time_limit,
        )  # fmt: skip
        return selector.best(*best)


OTHER_SCHEDULES = OtherSchedulesFamily()
