"""Make a plan from a joint solution: stages, ranks, prediction, certificate, alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fxpart.cluster.model import Cluster
from fxpart.errors import error
from fxpart.plan.contention import ContentionMeasurement, find_host_loads
from fxpart.plan.model import Certificate, Plan, PlanModel, PlanTiedParameter, Stage
from fxpart.plan.precision import precision_of, transfer_dtype_of
from fxpart.planner.prediction.alternatives import AlternativeComparison
from fxpart.planner.prediction.asynchronous_plan import as_weights
from fxpart.planner.prediction.descriptions import label
from fxpart.planner.prediction.joint_prediction import edges, predict
from fxpart.schedule.weight_modes import FLUSH
from fxpart.solver.joint.objective import JointEvaluation, JointScorer, JointStage, degrees
from fxpart.solver.joint.problem import (
    JointChoice,
    JointProblem,
    JointSolution,
    count_option_devices,
)
from fxpart.solver.schedule_costs import is_stream

_EXACT = 1e-6  # a smaller gap counts as zero


def make_joint_plan(
    model: PlanModel,
    cluster: Cluster,
    problem: JointProblem,
    solution: JointSolution,
    *,
    batch_size: int,
    optimizer: str,
    seed: int,
    provenance: Mapping[str, str],
    constraints: Mapping[str, int | float | str | bool],
    placed: Sequence[Sequence[int]] | None = None,
    parameters: Sequence[int] = (),
    contention: Callable[[str], ContentionMeasurement] | None = None,
) -> Plan:
    """Make the plan for ``solution.choice``.

    placed: for each stage the devices of its mesh ranks, as indices into the cluster's; None takes
    the next devices of the stage's pool. parameters: number of elements by block, where known.
    contention: as for :func:`fxpart.plan.contention.find_host_loads`.
    """
    choice = solution.choice
    assert choice is not None, "a plan needs a choice"
    scorer = JointScorer(problem)
    found = scorer.evaluate(choice)
    devices = assign_devices_in_order(cluster, problem, choice) if placed is None else placed
    used = sorted(device for ranks in devices for device in ranks)
    rank_of = {device: rank for rank, device in enumerate(used)}
    ranks = [tuple(rank_of[device] for device in stage) for stage in devices]
    pairs = edges(problem, choice)
    comparison = AlternativeComparison(scorer, choice, found)
    return Plan(
        model=model,
        cluster=cluster,
        cluster_hash=cluster.hash,
        mesh=_mesh(problem, choice),
        stages=tuple(
            _stage(problem, k, stage, ranks[k], parameters) for k, stage in enumerate(found.stages)
        ),
        ties=_ties(problem, found),
        batch_size=batch_size,
        microbatches=choice.microbatches,
        schedule=choice.schedule,
        weights=as_weights(problem.weights) if is_stream(choice.schedule) else FLUSH,
        precision=precision_of(constraints),
        transfer_dtype=transfer_dtype_of(constraints),
        offload=problem.layouts[problem.options[choice.options[0]].layout].offload,
        optimizer=optimizer,
        seed=seed,
        prediction=predict(
            choice,
            found,
            ranks,
            pairs,
            find_host_loads(cluster, used, contention),
            cluster=cluster,
            devices=devices,
        ),
        provenance=dict(provenance),
        certificate=_certificate(problem, solution, found, provenance),
        alternatives=comparison.candidates(solution),
        changes=comparison.changes(),
        constraints=dict(constraints),
        edges=pairs,
        devices=() if used == list(range(len(used))) else tuple(used),
    )


def assign_devices_in_order(
    cluster: Cluster, problem: JointProblem, choice: JointChoice
) -> list[tuple[int, ...]]:
    """Assign to each stage the next devices of its pool, in the cluster's order.

    Raises FXP305 where the cluster's device types are not the problem's pools.
    """
    from fxpart.pricing.topology import pools_of

    free: list[list[int]] = [[] for _ in problem.pools]
    of = pools_of(cluster)
    if max(of) >= len(free):
        raise error(
            "FXP305",
            where=f"cluster {cluster.name}",
            why=f"the cluster has {max(of) + 1} device types, but the costed problem has "
            f"{len(free)}",
            fix="price the model on this cluster again",
        )
    for device, pool in enumerate(of):
        free[pool].append(device)
    devices, used_counts = [], [0] * len(free)
    for index in choice.options:
        option = problem.options[index]
        first, count = used_counts[option.pool], count_option_devices(problem, option)
        devices.append(tuple(free[option.pool][first : first + count]))
        used_counts[option.pool] += count
    return devices


def _stage(
    problem: JointProblem,
    index: int,
    stage: JointStage,
    ranks: tuple[int, ...],
    parameters: Sequence[int],
) -> Stage:
    data, tensor, expert, _, _, context, *_ = degrees(problem, stage.option)
    option = problem.options[stage.option]
    blocks = [b for first, last in stage.pieces for b in range(first, last + 1)]
    return Stage(
        index=index,
        first=stage.pieces[0][0],
        last=stage.pieces[-1][1],
        label=", ".join(label(problem.blocks[a : b + 1]) for a, b in stage.pieces),
        ranks=ranks,
        data_parallel=data,
        tensor_parallel=tensor,
        expert_parallel=expert,
        context_parallel=context,
        zero=option.zero,
        shard_degree=option.shard_degree,
        recompute=option.recompute,
        device=problem.pools[option.pool].name,
        pieces=stage.pieces if len(stage.pieces) > 1 else (),
        parameters=sum(parameters[b] for b in blocks) if parameters else 0,
    )


def _mesh(problem: JointProblem, choice: JointChoice) -> dict[str, int]:
    used = {
        (one.data, one.tensor, one.context)
        for one in (degrees(problem, option) for option in choice.options)
    }
    whole = {"pipeline": len(choice.options)}
    if len(used) > 1:
        return whole
    data, tensor, context = used.pop()
    more = {"context": context} if context > 1 else {}
    return {**whole, "data": data, "tensor": tensor, **more}


def _ties(problem: JointProblem, found: JointEvaluation) -> tuple[PlanTiedParameter, ...]:
    """Return the tied parameters; the stage of the first use owns each."""
    result = []
    parameters = [tie for tie in problem.ties if not tie.buffer]
    for tie in sorted(parameters, key=lambda tie: tie.name):
        holders = [
            next(
                k
                for k, stage in enumerate(found.stages)
                if any(first <= block <= last for first, last in stage.pieces)
            )
            for block in tie.blocks
        ]
        result.append(
            PlanTiedParameter(
                names=(tie.name,), owner=holders[0], stages=tuple(sorted(set(holders)))
            )
        )
    return tuple(result)


def _certificate(
    problem: JointProblem,
    solution: JointSolution,
    found: JointEvaluation,
    provenance: Mapping[str, str],
) -> Certificate:
    objective = found.seconds
    bound = min(solution.bound, objective)
    gap = (objective - bound) / objective if objective > 0 else 0.0
    status = solution.status
    assert status in ("optimal", "within gap", "best found")
    return Certificate(
        status="within gap" if status == "optimal" and gap > _EXACT else status,
        objective=objective,
        lower_bound=bound,
        gap=gap,
        solver=solution.solver,
        over=_over(problem, provenance),
    )


def _over(problem: JointProblem, provenance: Mapping[str, str]) -> str:
    """Describe the set of plans for which the bound holds."""
    pools = " and ".join(f"{pool.devices} {pool.name}" for pool in problem.pools)
    counts = sorted(set(problem.microbatches))
    pieces = f"{counts[0]} to {counts[-1]}" if len(counts) > 4 else ", ".join(map(str, counts))
    same = ", equal for all stages" if problem.uniform else ""
    return (
        f"contiguous stages of these {len(problem.blocks)} blocks in their order, at most "
        f"{problem.max_stages} on {pools}; {len(problem.options)} options per stage "
        f"(devices, data, tensor, expert, ZeRO, recompute{same}); "
        f"{len(counts)} microbatch counts ({pieces}); "
        f"schedules {', '.join(problem.schedules)}; costs by "
        f"{provenance.get('compute', 'the cost model')}"
    )
