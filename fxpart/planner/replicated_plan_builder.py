"""Make plans whose stages have replicas, from the choices of the dynamic program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fxpart import units
from fxpart.codegen.generated_program import (
    GeneratedProgram,
    make_schedule,
    replicate_program_stages,
)
from fxpart.compat.optimizer_choice import choose
from fxpart.plan.model import Certificate, Plan
from fxpart.planner.plan_builder import make_plan, rank_prediction
from fxpart.planner.prediction.stage_replicas import StageReplicas, plan_replicas
from fxpart.planner.refinement import (
    describe_measured_stages,
    is_measured,
    keys_of,
    measured_whole,
)
from fxpart.program.replicas import get_replica_rounds
from fxpart.solver.problem import PartitionChoice, Solution
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
from fxpart.solver.solution import status_of

if TYPE_CHECKING:
    from fxpart.planner.prepared_model import PreparedModel
    from fxpart.planner.priced_mesh import PricedMesh


@dataclass(frozen=True)
class ReplicatedPlanBuilder:
    """Makes the plans of one solution.

    places: by device kind the devices of each replica that may be there. mesh: of a replica.
    """

    front: PreparedModel
    problem: ReplicatedChainProblem
    places: tuple[tuple[tuple[int, ...], ...], ...]
    answer: ReplicatedChainSolution
    mesh: PricedMesh

    def plan(self, choice: ReplicatedChainChoice) -> tuple[Plan, GeneratedProgram]:
        """Return the plan and program of one choice."""
        front, request, base = self.front, self.front.request, self.problem.base
        found = evaluate(self.problem, choice)
        chain = PartitionChoice(
            variant=choice.variant, schedule=choice.schedule, starts=choice.starts
        )
        count = base.variants[choice.variant].microbatches
        parts = self.mesh.parts(chain, microbatches=count)
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
            provenance=self.mesh.sources,
            constraints=request.constraints,
            shared=self.mesh.summarize_sharding(),
            order=self.mesh.assignment.order or (),
        )  # fmt: skip
        known, terms = self._with_measured_stages(choice, found, parts)
        made = plan_replicas(plan, list(self._groups(known)), self.answer.bound)
        sources = {**made.provenance, "choice": terms} if terms else made.provenance
        made = self._with_certificate(
            msgspec.structs.replace(made, provenance=sources), found, known
        )
        return made, replicate_program_stages(parts, get_replica_rounds(made))

    def _with_measured_stages(
        self,
        choice: ReplicatedChainChoice,
        found: ReplicatedChainEvaluation,
        parts: GeneratedProgram,
    ) -> tuple[ReplicatedChainEvaluation, str]:
        """Return measured times for replicas of stages that were measured whole on their device.

        And a description of which these are, where the cost model has such measurements.
        """
        request, base = self.front.request, self.problem.base
        model = request.cost_model
        if request.sharded or not is_measured(model, request.cluster):
            return found, ""
        variant = base.variants[choice.variant]
        keys = keys_of(
            self.front.captured, parts.spec, parts.sources, variant.microbatch_size,
            request.optimizer,
        )  # fmt: skip
        groups, whole = [], []
        for number, (group, key) in enumerate(zip(found.groups, keys, strict=True)):
            costs = []
            for replica, (kind, cost) in enumerate(zip(group.kinds, group.copies, strict=True)):
                device = request.cluster.devices[self.places[kind][0][0]]
                own = group.turns.count(replica)
                known = measured_whole(cost, key, device, model, base, variant.microbatches, own)
                costs.append(known or cost)
            groups.append(group.with_costs(costs))
            if all(cost is not before for cost, before in zip(costs, group.copies, strict=True)):
                whole.append(number)
        return evaluation_of(groups, found.faults), describe_measured_stages(whole, len(groups))

    def _groups(self, found: ReplicatedChainEvaluation) -> Iterator[StageReplicas]:
        """Yield each group's devices, in the cluster's order within a kind, and replica costs."""
        free_devices = [list(places) for places in self.places]
        shared = self.mesh.summarize_sharding()
        for number, group in enumerate(found.groups):
            devices = [device for kind in group.kinds for device in free_devices[kind].pop(0)]
            rows = []
            for cost in group.copies:
                row = rank_prediction(number, (), cost, shared, self.problem.by_kind)
                update = max(row.update, group.while_summing(cost))
                sums = row.sync_seconds + group.sums
                rows.append(msgspec.structs.replace(row, sync_seconds=sums, update=update))
            yield StageReplicas(tuple(devices), find_shortest_round(group.turns), tuple(rows))

    def _with_certificate(
        self, plan: Plan, found: ReplicatedChainEvaluation, known: ReplicatedChainEvaluation
    ) -> Plan:
        """Return the plan with the minimized objective and its certificate.

        known: the evaluation with the measured times of whole stages.
        """
        bound = min(self.answer.bound, found.seconds)
        status = status_of(found.seconds, bound)
        assert status in ("optimal", "within gap", "best found"), "there is a choice"
        width, mesh, each = self.mesh.request.mesh.size, "", ""
        if width > 1:
            mesh, each = f" of {self.mesh.request.mesh}", f"groups of {width} "
        kinds_ = ", ".join(f"{kind.devices} {each}{kind.name}" for kind in self.problem.kinds)
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
                f"with replicas{mesh} on any of {kinds_}, microbatches of "
                f"{', '.join(str(v.microbatches) for v in self.problem.base.variants)}, schedules "
                f"{', '.join(self.problem.base.schedules)}, costs by "
                f"{self.mesh.provenance.get('compute', 'the cost model')}",
            ),
            provenance={**plan.provenance, "copies": _terms(self.problem, known.groups)},
        )


def _terms(problem: ReplicatedChainProblem, groups: Sequence[ReplicaGroupCost]) -> str:
    """Describe the terms of the longest stage: c / n_c, g / n_g."""
    terms = []
    for group in groups:
        each = []
        for kind in dict.fromkeys(group.kinds):
            one = group.copies[group.kinds.index(kind)]
            count = group.kinds.count(kind)
            each.append(f"{units.seconds(one.seconds)} / {count} {problem.kinds[kind].name}")
        terms.append(f"{' with '.join(each)} = {units.seconds(group.pace)}")
    return "time per microbatch over replicas: " + ", ".join(terms)
