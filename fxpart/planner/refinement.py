"""Select among a solver's best candidates by measured costs.

The solver minimizes a closed form over costs of single ops, assuming that all ranks of a host
compute all the time. Among its best candidates of different kinds (numbers of stages, microbatches,
schedules), the one with the shortest simulated step is selected: the simulation models contention
only while ranks compute at the same time, and uses the measured time of stages that were measured
whole. A plan with a trial run in the profile takes that run's step time. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fxpart.codegen.stage_key import FIRST, stage_key, symbol_sizes
from fxpart.compat.optimizer_choice import choose
from fxpart.costmodels.profile_store import ContentionProfile, TrialRun
from fxpart.plan.model import Certificate, Plan
from fxpart.planner.prediction.plan_digest import plan_key
from fxpart.planner.prediction.trial_correction import estimate_correction, kind_of
from fxpart.pricing.non_op_costs import NonOpCosts
from fxpart.program.spec import ProgramSpec
from fxpart.schedule.host_contention import average_computing_stages
from fxpart.solver.objective import PartitionEvaluation, StageCost, evaluate
from fxpart.solver.portfolio import solve
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.schedule_costs import get_fill_fraction, step_seconds
from fxpart.solver.solution import status_of

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.cluster.devices import Device
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel

_COMPARED = 12  # candidates that are simulated, besides those of each number of stages:
_SPREAD = 16  # this many in total, and at least the best of each number
_SOLVING = 2.0  # seconds of solving for each number of stages


def is_measured(model: CostModel, cluster: Cluster) -> bool:
    """Return whether plans are compared by simulation: contention of the hosts was measured."""
    return model.knowledge(cluster.devices[0]).contention is not None


def find_contention(
    model: CostModel, cluster: Cluster
) -> Callable[[str], ContentionProfile] | None:
    """Return the contention profile by host; None where it was not measured."""
    if not is_measured(model, cluster):
        return None
    first = {device.host: device for device in reversed(cluster.devices)}
    unknown = ContentionProfile()
    return lambda host: model.knowledge(first[host]).contention or unknown


def plan_seconds(plan: Plan, model: CostModel) -> float:
    """Return the step time, in seconds, by which plans of different meshes are compared."""
    found = plan.prediction
    return found.expected_seconds if is_measured(model, plan.cluster) else found.step_seconds


def with_trial_run(plan: Plan, model: CostModel) -> Plan:
    """Return the plan with the step time of its own trial run, or corrected by similar plans'."""
    runs = model.knowledge(plan.device(0)).trial_runs
    if not runs:
        return plan
    kinds = [one for one in runs.values() if one.model == plan.model.fingerprint]
    return correct_by_trial_runs(plan, runs.get(plan_key(plan)), kinds)


def correct_by_trial_runs(plan: Plan, own: TrialRun | None, runs: Collection[TrialRun]) -> Plan:
    """Return the plan with its own trial run, or corrected by those of other plans."""
    if own is not None:
        prediction = msgspec.structs.replace(plan.prediction, rehearsed_seconds=own.seconds.seconds)
        return msgspec.structs.replace(plan, prediction=prediction)
    if not runs:
        return plan
    times = estimate_correction(kind_of(plan), runs).times
    seconds = times * plan.prediction.simulated_seconds
    prediction = msgspec.structs.replace(plan.prediction, corrected_seconds=seconds)
    return msgspec.structs.replace(plan, prediction=prediction)


@dataclass(frozen=True)
class RefinedEvaluation:
    """An evaluation with measured stage times. whole: the stages that were measured whole."""

    evaluation: PartitionEvaluation
    whole: tuple[int, ...] = ()

    def describe(self) -> str:
        """Describe which stages were measured whole, for the plan."""
        return describe_measured_stages(self.whole, len(self.evaluation.stages))


def describe_measured_stages(whole: Sequence[int], count: int) -> str:
    """Describe which of ``count`` stages were measured whole."""
    if len(whole) == count:
        return "every stage measured whole"
    if not whole:
        return "every stage estimated from its ops"
    named = ", ".join(map(str, whole))
    return f"stages {named} of {count} measured whole, the others estimated from their ops"


def refine_evaluation(
    evaluation: PartitionEvaluation,
    problem: PartitionProblem,
    choice: PartitionChoice,
    keys: Sequence[str],
    model: CostModel,
    devices: Sequence[Sequence[Device]],
) -> RefinedEvaluation:
    """Return the evaluation with measured times for stages measured whole.

    keys: stage key of each stage. devices: by stage, those of its ranks; the slowest counts. Times
    are those while all ranks of the host compute, as in the problem. Tied-parameter reduction and
    transfers keep the problem's times; so do, for stages of several ranks, their collectives and
    the optimizer step.
    """
    count = problem.variants[choice.variant].microbatches
    stages: list[StageCost] = []
    whole = []
    for index, (stage, key, places) in enumerate(
        zip(evaluation.stages, keys, devices, strict=True)
    ):
        known = _slowest(stage, key, places, model, problem, count)
        stages.append(stage if known is None else known)
        if known is not None:
            whole.append(index)
    fill = get_fill_fraction(choice.schedule, count, len(stages))
    once = [stage.step_only_seconds for stage in stages]
    seconds = step_seconds([stage.seconds for stage in stages], once, count, fill)
    made = msgspec.structs.replace(evaluation, seconds=seconds, stages=tuple(stages))
    return RefinedEvaluation(made, tuple(whole)) if whole else RefinedEvaluation(evaluation)


def _slowest(
    stage: StageCost,
    key: str,
    devices: Sequence[Device],
    model: CostModel,
    problem: PartitionProblem,
    count: int,
) -> StageCost | None:
    """Return the measured costs of a stage's slowest rank; None where one was not measured."""
    kinds = {(d.model, d.host, d.threads, d.share): d for d in devices}
    every = [measured_whole(stage, key, d, model, problem, count) for d in kinds.values()]
    known = [one for one in every if one is not None]
    if len(known) < len(every):
        return None
    slowest = max(known, key=lambda one: one.forward_seconds + one.backward_seconds)
    if len(devices) == 1:
        return slowest
    collective = stage.collective_seconds / 2  # about half of it in each direction
    return msgspec.structs.replace(
        slowest,
        forward_seconds=slowest.forward_seconds + collective,
        backward_seconds=slowest.backward_seconds + collective,
        optimizer_seconds=stage.optimizer_seconds,
    )


def measured_whole(
    stage: StageCost,
    key: str,
    device: Device,
    model: CostModel,
    problem: PartitionProblem,
    microbatches: int,
    own_microbatches: int | None = None,
) -> StageCost | None:
    """Return the stage with its measured whole times on a device; None where not measured.

    microbatches: per batch. own_microbatches: those of this stage replica, by default all.
    Rows of embedding tables are merged here over all microbatches, per step.
    """
    stages = model.knowledge(device).stages
    later, first = stages.get(key), stages.get(key + FIRST)
    if later is None or first is None:
        return None
    own = NonOpCosts.of(model, device)
    here, timed = own_microbatches or microbatches, later.microbatches
    blocks = range(stage.first, stage.last + 1)
    weights = [w for w in problem.weights if any(block in blocks for block in w.blocks)]
    if stage.host:  # stages are measured without offload
        return None
    update = own.of_timed(weights, timed / microbatches, timed) * later.optimizer.seconds
    back = (first.backward.seconds + (here - 1) * later.backward.seconds) / here
    merged = own.merging(weights, microbatches) * microbatches / here
    if stage.recompute != "none":  # stages are measured without recomputation
        merged += stage.recompute_seconds
    merged += stage.splitting_seconds  # and with whole backwards
    return msgspec.structs.replace(
        stage,
        forward_seconds=own.full * later.forward.seconds + problem.action,
        backward_seconds=own.full * back + merged + problem.action,
        optimizer_seconds=own.full * update + problem.once,
    )


def keys_of(
    captured: CapturedModel, spec: ProgramSpec, sources: Sequence[str], rows: int, optimizer: object
) -> list[str]:
    """Return the stage keys of a program for microbatches of ``rows`` rows."""
    dims = {item.name: item.batch_dim for item in spec.inputs}
    if not captured.symbolic:
        dims = {}
    sizes = symbol_sizes(spec.symbols, dims, captured.hints, rows)
    name = choose(optimizer).name
    return [stage_key(text, spec, k, sizes, name) for k, text in enumerate(sources)]


@dataclass(frozen=True)
class EvaluatedCandidate:
    """One evaluated candidate. plan: its plan, with the simulated step."""

    plan: Plan
    refined: RefinedEvaluation

    @property
    def seconds(self) -> float:
        """Return the step time by which candidates are compared."""
        return self.plan.prediction.expected_seconds


@dataclass(frozen=True)
class RerankedSolution:
    """The solution with the candidate that simulates best, and all evaluated candidates.

    found: by choice, in the order of evaluation.
    """

    solution: Solution
    found: Mapping[PartitionChoice, EvaluatedCandidate]

    def describe(self) -> str:
        """Describe the comparison, for the plan."""
        assert self.solution.choice is not None, "one was chosen"
        stages = self.found[self.solution.choice].refined.describe()
        if len(self.found) == 1:
            return f"the only candidate, simulated; {stages}"
        return f"the best of {len(self.found)} candidates by simulated step; {stages}"


def widen_solution(
    problem: PartitionProblem, solution: Solution, pace: Callable[[float], float], *, seed: int = 0
) -> Solution:
    """Return the solution with more candidates: the best of every number of stages.

    The closed form assumes that all ranks of a host compute all the time, so it favors the largest
    number of stages. pace: factor on its seconds while so many stages compute at once. Kept are the
    best candidates at the average number of computing stages, and the best of each number of
    stages.
    """
    assert solution.choice is not None, "the problem is feasible"
    found = {choice: evaluate(problem, choice).seconds for choice in solution.candidates}
    for stages in range(problem.min_stages, problem.max_stages + 1):
        alone = msgspec.structs.replace(problem, min_stages=stages, max_stages=stages)
        more = solve(alone, time_limit=_SOLVING, seed=seed)
        found |= {choice: evaluate(problem, choice).seconds for choice in more.candidates}

    def busy(choice: PartitionChoice) -> float:
        return average_computing_stages(
            len(choice.starts), problem.variants[choice.variant].microbatches
        )

    own = {choice: seconds * pace(busy(choice)) for choice, seconds in found.items()}
    ordered = sorted(own, key=lambda choice: own[choice])
    kinds: dict[tuple[int, int, str], PartitionChoice] = {}
    for choice in ordered:
        kinds.setdefault(_kind(choice), choice)
    counts = {stages for stages, _, _ in kinds}
    each = max(1, _SPREAD // max(1, len(counts)))
    first = [
        choice
        for stages in sorted(counts)
        for choice in [c for kind, c in kinds.items() if kind[0] == stages][:each]
    ]
    kept = {_kind(choice): choice for choice in (*first, *list(kinds.values())[:_COMPARED])}
    kept.pop(_kind(solution.choice), None)
    others = sorted(kept.values(), key=lambda choice: own[choice])
    return msgspec.structs.replace(solution, candidates=(solution.choice, *others))


def _kind(choice: PartitionChoice) -> tuple[int, int, str]:
    return len(choice.starts), choice.variant, choice.schedule


def rerank(
    problem: PartitionProblem,
    solution: Solution,
    evaluate_candidate: Callable[[PartitionChoice, PartitionEvaluation], EvaluatedCandidate],
) -> RerankedSolution:
    """Return the candidate with the shortest simulated step; of equal ones the solver's first.

    evaluate_candidate: plans a choice. The bound is still that of the closed form, and the
    status is computed from the selected candidate's gap to it.
    """
    assert solution.choice is not None, "the problem is feasible"
    found: dict[PartitionChoice, EvaluatedCandidate] = {}
    for choice in (solution.choice, *solution.candidates):
        evaluation = evaluate(problem, choice)
        if choice not in found and evaluation.feasible:
            found[choice] = evaluate_candidate(choice, evaluation)
    best = min(found, key=lambda choice: found[choice].seconds)
    others = sorted((c for c in found if c != best), key=lambda choice: found[choice].seconds)
    objective = evaluate(problem, best).seconds
    answer = with_other_choice(solution, best, objective)
    return RerankedSolution(msgspec.structs.replace(answer, candidates=(best, *others)), found)


def with_other_choice(solution: Solution, choice: PartitionChoice, objective: float) -> Solution:
    """Return the solution with another choice; the bound stays, the status is recomputed."""
    same = choice == solution.choice
    return msgspec.structs.replace(
        solution,
        choice=choice,
        objective=objective,
        status=solution.status if same else status_of(objective, solution.bound),
        candidates=(choice,),
    )


def certify_plan(certificate: Certificate, solution: Solution) -> Certificate:
    """Return the certificate of the closed form over op costs, without whole-stage measurements."""
    objective, bound = solution.objective, min(solution.bound, solution.objective)
    status = solution.status
    assert status in ("optimal", "within gap", "best found"), "there is a choice"
    return msgspec.structs.replace(
        certificate,
        status=status,
        objective=objective,
        lower_bound=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
    )
