"""From a solver's choice to a plan: labels, predictions, certificate, rejected alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fxpart.cluster import Cluster
from fxpart.plan import (
    Alternative,
    Certificate,
    Memory,
    Plan,
    PlanModel,
    Prediction,
    RankPrediction,
    Stage,
    Tie,
)
from fxpart.program import ProgramSpec
from fxpart.runtime.links import edges as edges_of
from fxpart.schedule.action import Kind, Schedule, StageEdge
from fxpart.schedule.simulate import simulate
from fxpart.solver.objective import Evaluation, StageCost, evaluate
from fxpart.solver.problem import Choice, PartitionProblem, Solution


def make_plan(
    model: PlanModel,
    cluster: Cluster,
    spec: ProgramSpec,
    schedule: Schedule,
    problem: PartitionProblem,
    solution: Solution,
    *,
    batch_size: int,
    optimizer: str,
    provenance: Mapping[str, str],
    constraints: Mapping[str, int | float | str | bool],
) -> Plan:
    """The plan for ``solution.choice``; ``schedule`` is lowered and serves the program's edges."""
    choice = solution.choice
    assert choice is not None, "a plan needs a choice"
    variant = problem.variants[choice.variant]
    evaluation = evaluate(problem, choice)
    edges = edges_of(spec)
    return Plan(
        model=model,
        cluster=cluster,
        cluster_hash=cluster.hash,
        mesh={"pipeline": len(choice.starts), "data": 1, "tensor": 1},
        stages=tuple(
            Stage(
                index=k,
                first=cost.first,
                last=cost.last,
                label=label(problem.blocks[cost.first : cost.last + 1]),
                ranks=(k,),
                parameters=sum(
                    _count(s.shape) for s in spec.stages[k].state if s.kind == "parameter"
                ),
            )
            for k, cost in enumerate(evaluation.stages)
        ),
        ties=_ties(spec),
        batch_size=batch_size,
        microbatches=variant.microbatches,
        schedule=choice.schedule,
        optimizer=optimizer,
        seed=spec.seed,
        prediction=_prediction(problem, evaluation, schedule, edges),
        provenance=dict(provenance),
        certificate=_certificate(problem, solution, evaluation, provenance),
        alternatives=_alternatives(problem, solution, evaluation),
        constraints=dict(constraints),
        edges=tuple((e.source, e.target, e.backward) for e in edges),
    )


def label(blocks: Sequence[str]) -> str:
    """Blocks as people name them: the first and the last."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _ties(spec: ProgramSpec) -> tuple[Tie, ...]:
    others: dict[str, list[str]] = {}
    for alias, main in sorted(spec.aliases.items()):
        others.setdefault(main, []).append(alias)
    return tuple(
        Tie(names=(name, *others.get(name, [])), owner=stages[0], stages=tuple(sorted(stages)))
        for name, stages in sorted(spec.ties.items())
    )


def _prediction(
    problem: PartitionProblem,
    evaluation: Evaluation,
    schedule: Schedule,
    edges: Sequence[StageEdge],
) -> Prediction:
    """Closed form, and the simulated schedule with transfers that overlap computation.

    A pair's transfer takes its stages' mean share of the predicted transfer time; what is done
    once a step (tie sums, optimizer) follows the stage's last backward.
    """
    stages = evaluation.stages
    incoming = {k: sum(1 + e.backward for e in edges if e.target == k) for k in range(len(stages))}

    def seconds(stage: int, peer: int, kind: Kind) -> float:
        receiver = peer if kind is Kind.SEND_F else stage
        return stages[receiver].transfer_seconds / max(1, incoming[receiver])

    timeline = simulate(
        schedule,
        edges,
        [s.forward_seconds for s in stages],
        [s.backward_seconds for s in stages],
        seconds,
    )
    ends = dict.fromkeys(range(len(stages)), 0.0)
    for span in timeline.spans:
        if span.lane == "compute":
            ends[span.action.stage] = max(ends[span.action.stage], span.end)
    simulated = max(ends[k] + s.step_only_seconds for k, s in enumerate(stages))
    busy = sum(timeline.busy) + sum(s.step_only_seconds for s in stages)
    share = busy / (simulated * len(stages)) if simulated > 0 else 1.0
    return Prediction(
        step_seconds=evaluation.seconds,
        simulated_seconds=simulated,
        bubble=min(1.0, max(0.0, 1.0 - share)),
        ranks=tuple(_rank(problem, k, cost) for k, cost in enumerate(stages)),
    )


def _rank(problem: PartitionProblem, rank: int, cost: StageCost) -> RankPrediction:
    m = cost.memory
    return RankPrediction(
        rank=rank,
        stage=rank,
        device=problem.devices[cost.device].name,
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.backward_seconds,
        transfer_seconds=cost.transfer_seconds,
        sync_seconds=cost.sync_seconds,
        optimizer_seconds=cost.optimizer_seconds,
        memory=Memory(
            weights=m.weights,
            gradients=m.gradients,
            optimizer=m.optimizer,
            activations=m.activations,
            buffers=m.buffers,
            transfers=m.transfers,
        ),
        memory_limit=cost.memory_limit,
        in_flight=cost.in_flight,
    )


def _certificate(
    problem: PartitionProblem,
    solution: Solution,
    evaluation: Evaluation,
    provenance: Mapping[str, str],
) -> Certificate:
    objective = evaluation.seconds
    bound = min(solution.bound, objective)
    status = solution.status
    assert status in ("optimal", "within gap", "best found")
    counts = sorted({v.microbatches for v in problem.variants})
    return Certificate(
        status=status,
        objective=objective,
        lower_bound=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        solver=solution.solver,
        over=(
            f"contiguous stages of these {len(problem.blocks)} blocks on at most "
            f"{problem.max_stages} of {len(problem.devices)} devices in their order, "
            f"microbatches of {', '.join(map(str, counts))}, schedules "
            f"{', '.join(problem.schedules)}, costs by "
            f"{provenance.get('compute', 'the cost model')}"
        ),
    )


def _alternatives(
    problem: PartitionProblem, solution: Solution, best: Evaluation
) -> tuple[Alternative, ...]:
    rows = []
    for candidate in solution.candidates:
        if candidate == solution.choice:
            continue
        found = evaluate(problem, candidate)
        rows.append(
            Alternative(
                stages=len(candidate.starts),
                microbatches=problem.variants[candidate.variant].microbatches,
                step_seconds=found.seconds if found.feasible else None,
                why=_why_lost(problem, candidate, found, best),
            )
        )
    return tuple(rows[:5])


def _why_lost(
    problem: PartitionProblem, candidate: Choice, found: Evaluation, best: Evaluation
) -> str:
    """In words: memory, or which part of the time is larger."""
    if not found.feasible:
        return f"does not fit: {found.faults[0]}"
    slower = found.seconds / best.seconds - 1 if best.seconds > 0 else 0.0
    longest = max(range(len(found.stages)), key=lambda k: found.stages[k].seconds)
    stage = found.stages[longest]
    part = "transfers" if stage.transfer_seconds > stage.seconds / 2 else "computation"
    fill = sum(s.seconds for s in found.stages) - stage.seconds
    share = fill / found.seconds if found.seconds > 0 else 0.0
    return (
        f"{slower:.1%} slower ({candidate.schedule}): stage {longest} takes "
        f"{stage.seconds * 1e3:.3g} ms a microbatch, mostly {part}; filling the pipeline is "
        f"{share:.0%} of the step"
    )
