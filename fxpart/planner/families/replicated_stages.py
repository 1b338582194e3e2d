"""Plans whose stages have copies on devices of any kind: n slow ranks that feed m fast ones.

Where devices differ, the split of the model and the number of devices of each kind for each part
are chosen together (:mod:`fxpart.solver.replicated_chain`), and compared by simulation with what
else is known: the best plan with equal stages, and the best that uses devices of one kind only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from fxpart import units
from fxpart.codegen.generated_program import (
    GeneratedProgram,
    generate_program,
    make_schedule,
    replicate_program_stages,
)
from fxpart.compat.optimizer_choice import choose
from fxpart.errors import FxpartError
from fxpart.plan.model import Certificate, Plan
from fxpart.planner.families.schedule_selection import keep_cut_schedules, requested_schedules
from fxpart.planner.mesh_plan import apply_constraints
from fxpart.planner.plan_builder import make_plan, rank_prediction
from fxpart.planner.plan_family import ModelContext, PlanSearchResult
from fxpart.planner.prediction.schedule_change import find_overfull_ranks
from fxpart.planner.prediction.stage_replicas import StageReplicas, plan_replicas
from fxpart.planner.refinement import is_measured, keys_of, measured_whole, whole_words
from fxpart.planner.request import fixed_stages
from fxpart.pricing.device_limits import group_by_kind, named
from fxpart.pricing.partition import price
from fxpart.pricing.replicated_problem import is_heterogeneous, mixed_problem
from fxpart.program.replicas import get_replica_rounds
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.joint.constraints.parse import parse_constraints
from fxpart.solver.portfolio import status_of
from fxpart.solver.problem import PartitionChoice, Solution
from fxpart.solver.replicated_chain.dp import size_of, solve_replicated_chain
from fxpart.solver.replicated_chain.objective import (
    ReplicaGroupCost,
    ReplicatedChainEvaluation,
    evaluate,
    evaluation_of,
)
from fxpart.solver.replicated_chain.problem import (
    ReplicatedChainChoice,
    ReplicatedChainProblem,
    ReplicatedChainSolution,
)
from fxpart.solver.replicated_chain.round_robin import find_shortest_round

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.request import PlanRequest

_ALIKE = "equal stages"
_KEPT = ("microbatches", "schedule")  # wishes that plans with copies keep to
_LOOKED = 8  # answers that are simulated
_MOST = 40_000_000  # of the dynamic programme's size: larger ones are left to equal stages

Found = tuple[Plan, GeneratedProgram]


def explain_equal_stages(request: PlanRequest) -> str | None:
    """Return why replicas are not considered; None where they are.

    They are where devices differ, or where they are requested; not under constraints on degrees or
    cuts, which replicas would have to keep to.
    """
    wish = str(request.constraints.get("copies", "auto"))
    free = request.open or (request.mesh.size == 1 and request.zero == 0)
    stages = (
        ("pp",) if fixed_stages(request.constraints) is not None else ()
    )  # by the name that is kept to
    wishes = parse_constraints(request.constraints)
    if wish == "none":
        return "copies=none is requested"
    if request.mode != "sync":
        return f"the mode is {request.mode}"
    if not free:
        return "a stage has several ranks"
    if not all(one.kind == "fix" and one.key in (*_KEPT, *stages) for one in wishes):
        return "constraints fix degrees or cuts"
    return (
        None if wish == "always" or is_heterogeneous(request.cluster) else "all devices are alike"
    )


def best_mixed(front: PreparedModel, microbatches: int | None) -> Found | None:
    """The plan with copies that is fastest by simulation; None where none fits, or none is asked
    for that could be better than equal stages."""
    request = front.request
    names = keep_cut_schedules(requested_schedules(request))
    if not any(SCHEDULES[name].supports_replicas for name in names):
        return None
    problem, provenance = price(
        front.graph,
        front.captured,
        request.cluster,
        cost_model=request.cost_model,
        batch_size=front.captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
        schedules=tuple(name for name in names if SCHEDULES[name].supports_replicas),
        min_stages=request.stages[0] if fixed_stages(request.constraints) is not None else 1,
        max_stages=request.stages[1],
        transfer_dtype=request.transfer_dtype,
    )
    base = apply_constraints(problem, request, None)
    given, places = mixed_problem(base, request.cluster, request.cost_model, request.ranks)
    if size_of(given) > _MOST:
        return None
    limit = float(request.constraints.get("time_limit", 30.0)) / 2
    answer = solve_replicated_chain(given, time_limit=limit)
    mine = _ReplicatedPlanBuilder(front, given, places, answer, provenance)
    found = [mine.plan(choice) for choice in answer.candidates[:_LOOKED]]
    fitting = [one for one in found if not find_overfull_ranks(one[0])]
    return min(fitting, key=_seconds, default=None)


def choose_fastest_plan(
    front: PreparedModel, microbatches: int | None, alike: Callable[[PreparedModel], Found]
) -> tuple[Plan, GeneratedProgram, bool]:
    """The fastest by simulation of plans of equal stages, with copies, and on one kind alone.

    alike: the best plan of equal stages of a request; raises FXP2xx where there is none, as this
    does where there is none of any sort. Where so many ranks are asked for, those that have them go
    before. Returned is also whether it is the first of these.
    """
    request = front.request
    candidates: list[tuple[str, Found]] = []
    fault: FxpartError | None = None
    try:
        candidates.append((_ALIKE, alike(front)))
    except FxpartError as caught:
        fault = caught
    try:
        mixed = best_mixed(front, microbatches)
    except FxpartError:
        mixed = None  # told by the others
    if mixed is not None:
        candidates.append((_words(mixed[0]), mixed))
    for name, indices, part in _of_one_kind(request):
        try:
            made = alike(replace(front, request=part))
        except FxpartError:
            continue
        candidates.append((f"{name} only", (_lifted(made[0], request, indices), made[1])))
    if not candidates:
        assert fault is not None, "one of them said why"
        raise fault
    ranked = sorted(candidates, key=lambda one: (_misses(one[1], request), _seconds(one[1])))
    (name, (plan, parts)), *others = ranked
    rest = "; ".join(f"{other}: {units.seconds(_seconds(one))}" for other, one in others)
    words = f"{name}: {units.seconds(_seconds((plan, parts)))} simulated; {rest}"
    told = msgspec.structs.replace(
        plan,
        provenance={**plan.provenance, "kinds": words},
        constraints=dict(request.constraints),
    )
    return told, parts, name == _ALIKE


def _misses(found: Found, request: PlanRequest) -> bool:
    """Whether another number of ranks was asked for, as by torchrun."""
    return request.ranks not in (None, found[0].world)


@dataclass(frozen=True)
class _ReplicatedPlanBuilder:
    """What the plans of one answer have in common. places: by kind the cluster's devices."""

    front: PreparedModel
    problem: ReplicatedChainProblem
    places: tuple[tuple[int, ...], ...]
    answer: ReplicatedChainSolution
    provenance: dict[str, str]

    def plan(self, choice: ReplicatedChainChoice) -> Found:
        """The plan and program of one choice."""
        front, request, base = self.front, self.front.request, self.problem.base
        found = evaluate(self.problem, choice)
        chain = PartitionChoice(
            variant=choice.variant, schedule=choice.schedule, starts=choice.starts
        )
        parts = generate_program(
            front.captured, front.graph, None, choice.starts, request.seed, (),
            request.transfer_dtype, microbatches=base.variants[choice.variant].microbatches,
        )  # fmt: skip
        count = base.variants[choice.variant].microbatches
        plan = make_plan(
            front.info,
            request.cluster,
            parts.spec,
            make_schedule(parts.spec, choice.schedule, count),
            base,
            Solution(
                status="best found", choice=chain, objective=found.seconds,
                bound=self.answer.bound, solver=self.answer.solver,
            ),
            batch_size=front.captured.batch_size,
            optimizer=choose(request.optimizer).name,
            provenance=self.provenance,
            constraints=request.constraints,
        )  # fmt: skip
        known, words = self._whole(choice, found, parts)
        made = plan_replicas(plan, list(self._groups(known)), self.answer.bound)
        told = {**made.provenance, "choice": words} if words else made.provenance
        made = self._proven(msgspec.structs.replace(made, provenance=told), found, known)
        return made, replicate_program_stages(parts, get_replica_rounds(made))

    def _whole(
        self,
        choice: ReplicatedChainChoice,
        found: ReplicatedChainEvaluation,
        parts: GeneratedProgram,
    ) -> tuple[ReplicatedChainEvaluation, str]:
        """With measured seconds for copies of stages that were measured whole on such devices.

        And which these are, where the cost model knows of any.
        """
        request, base = self.front.request, self.problem.base
        model = request.cost_model
        if not is_measured(model, request.cluster):
            return found, ""
        variant = base.variants[choice.variant]
        keys = keys_of(
            self.front.captured, parts.spec, parts.sources, variant.microbatch_size,
            request.optimizer,
        )  # fmt: skip
        groups, whole = [], []
        for number, (group, key) in enumerate(zip(found.groups, keys, strict=True)):
            costs = []
            for copy, (kind, cost) in enumerate(zip(group.kinds, group.copies, strict=True)):
                device = request.cluster.devices[self.places[kind][0]]
                taken = group.turns.count(copy)
                known = measured_whole(cost, key, device, model, base, variant.microbatches, taken)
                costs.append(known or cost)
            groups.append(group.with_costs(costs))
            if all(cost is not before for cost, before in zip(costs, group.copies, strict=True)):
                whole.append(number)
        return evaluation_of(groups, found.faults), whole_words(whole, len(groups))

    def _groups(self, found: ReplicatedChainEvaluation) -> Iterator[StageReplicas]:
        """Each group's devices, in the cluster's order within a kind, and what copies cost."""
        left = [list(devices) for devices in self.places]
        for number, group in enumerate(found.groups):
            devices = tuple(left[kind].pop(0) for kind in group.kinds)
            rows = []
            for cost in group.copies:
                row = rank_prediction(number, (), cost, None, self.problem.by_kind)
                update = max(row.update, group.while_summing(cost))
                rows.append(msgspec.structs.replace(row, sync_seconds=group.sums, update=update))
            yield StageReplicas(devices, find_shortest_round(group.turns), tuple(rows))

    def _proven(
        self, plan: Plan, found: ReplicatedChainEvaluation, known: ReplicatedChainEvaluation
    ) -> Plan:
        """The plan with the objective that was minimised, and what is proven of it.

        known: the same with what was measured of stages as a whole.
        """
        bound = min(self.answer.bound, found.seconds)
        status = status_of(found.seconds, bound)
        assert status in ("optimal", "within gap", "best found"), "there is a choice"
        kinds_ = ", ".join(f"{kind.devices} {kind.name}" for kind in self.problem.kinds)
        gap = (found.seconds - bound) / found.seconds if found.seconds > 0 else 0.0
        return msgspec.structs.replace(
            plan,
            prediction=msgspec.structs.replace(plan.prediction, step_seconds=known.seconds),
            certificate=Certificate(
                status=status,
                objective=found.seconds,
                lower_bound=bound,
                gap=gap,
                solver=self.answer.solver,
                over=f"contiguous groups of these {len(self.problem.base.blocks)} blocks, each "
                f"with copies on any of {kinds_}, microbatches of "
                f"{', '.join(str(v.microbatches) for v in self.problem.base.variants)}, schedules "
                f"{', '.join(self.problem.base.schedules)}, costs by "
                f"{self.provenance.get('compute', 'the cost model')}",
            ),
            provenance={**plan.provenance, "copies": _terms(self.problem, known.groups)},
        )


def _terms(problem: ReplicatedChainProblem, groups: Sequence[ReplicaGroupCost]) -> str:
    """The terms of the longest stage: c / n_c, g / n_g, as they were weighed."""
    words = []
    for group in groups:
        each = []
        for kind in dict.fromkeys(group.kinds):
            one = group.copies[group.kinds.index(kind)]
            count = group.kinds.count(kind)
            each.append(f"{units.seconds(one.seconds)} / {count} {problem.kinds[kind].name}")
        words.append(f"{' with '.join(each)} = {units.seconds(group.pace)}")
    return "seconds of a microbatch over copies: " + ", ".join(words)


def _of_one_kind(request: PlanRequest) -> Iterator[tuple[str, tuple[int, ...], PlanRequest]]:
    """Requests for the devices of each kind alone."""
    cluster = request.cluster
    types = group_by_kind(cluster)[1]
    members: dict[tuple[int, int], list[int]] = {}
    for index, (type_, device) in enumerate(zip(types, cluster.devices, strict=True)):
        members.setdefault((type_, device.memory), []).append(index)
    for devices in members.values() if len(members) > 1 else ():
        if request.ranks is not None and len(devices) < request.ranks:
            continue
        part = cluster.part(devices)
        wish = fixed_stages(request.constraints) is not None
        stages = request.stages if wish else (1, len(devices))
        name = f"{len(devices)} {named(cluster.devices[devices[0]])}"
        costs = request.cost_model.for_part(part)
        yield name, tuple(devices), replace(request, cluster=part, stages=stages, cost_model=costs)


def _lifted(plan: Plan, request: PlanRequest, indices: Sequence[int]) -> Plan:
    """A plan for some of the cluster's devices as one for all of it."""
    taken = tuple(indices[place] for place in (plan.devices or range(plan.world)))
    return msgspec.structs.replace(
        plan,
        cluster=request.cluster,
        cluster_hash=request.cluster.hash,
        devices=() if taken[-1] < len(taken) else taken,
    )


def _seconds(found: Found) -> float:
    return found[0].prediction.expected_seconds


def _words(plan: Plan) -> str:
    """A plan with copies in a few words: "3 + 1 copies"."""
    groups = {group[0]: len(set(group)) for group in plan.replicas}
    counts = [groups.get(first, 1) for first in plan.firsts]
    return f"{' + '.join(map(str, counts))} copies" if plan.replicas else "a chain of single ranks"


class ReplicatedStagesFamily:
    """Plans whose stages have replicas in turns, or that use the devices of one kind alone."""

    name = "replicated stages"

    def accepts(self, request: PlanRequest, cluster: Cluster) -> str | None:
        """Return None where replicas are considered: for heterogeneous devices or on request."""
        return explain_equal_stages(request)

    def plan(self, context: ModelContext) -> PlanSearchResult:
        """Return the fastest by simulation of these plans and those of equal stages."""
        made: list[PlanSearchResult] = []

        def alike(part: PreparedModel) -> Found:
            made.append(context.search(part))
            return made[-1].plan, made[-1].parts

        plan, parts, same = choose_fastest_plan(context.front, context.microbatches, alike)
        return PlanSearchResult(plan, parts, made[0].problem if same else None)


REPLICATED_STAGES = ReplicatedStagesFamily()
