"""Make a plan from a solver's choice: labels, prediction, certificate, rejected alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, prod
from typing import TYPE_CHECKING, Literal, cast

from torch import fx

from fxpart.capture.fingerprint import fingerprint
from fxpart.cluster.model import Cluster
from fxpart.compiler import BLOCKS_KEY
from fxpart.plan.contention import complete_host_loads, find_host_loads
from fxpart.plan.model import (
    Alternative,
    Certificate,
    PeakMemory,
    Plan,
    PlanInput,
    PlanModel,
    PlanSharding,
    PlanTiedParameter,
    Prediction,
    RankPrediction,
    Stage,
)
from fxpart.plan.offload import offload_of
from fxpart.plan.precision import precision_of, transfer_dtype_of
from fxpart.plan.prediction import HostLoad, StepParts, step_parts
from fxpart.plan.schedule import with_directions
from fxpart.planner.prediction.descriptions import explain_rejection, label
from fxpart.planner.prediction.step_simulation import simulate_step
from fxpart.pricing.rule_coverage import count_model_work
from fxpart.pricing.stage_parallelism import GradientReductionTimes
from fxpart.program.edges import find_stage_edges as edges_of
from fxpart.program.spec import ProgramSpec
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.spec import SCHEDULES
from fxpart.sharding import Mesh
from fxpart.solver.objective import PartitionEvaluation, StageCost, evaluate
from fxpart.solver.problem import PartitionChoice, PartitionProblem, Solution
from fxpart.solver.schedule_costs import get_fill_fraction
from fxpart.solver.stage_graph.stage_partition import StagePartition

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel


@dataclass(frozen=True)
class ShardingSummary:
    """How the ranks of a stage share its work, for the plan.

    degrees: of data, tensor, expert and context parallelism. shard_degree: as in a stage of a plan.
    sums: times of the
    gradient reduction and ZeRO's collectives per step, which the problem counts as optimizer time.
    """

    sharding: PlanSharding
    degrees: tuple[int, int, int, int]
    shard_degree: int = 0
    sums: GradientReductionTimes = field(default_factory=GradientReductionTimes)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of every stage."""
        return Mesh.parse(self.sharding.mesh)


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
    shared: ShardingSummary | None = None,
    order: Sequence[int] = (),
    made: StagePartition | None = None,
    hosts: Sequence[HostLoad] | None = None,
) -> Plan:
    """Make the plan for ``solution.choice``.

    schedule: lowered, with the program's edges. shared: where a stage is several ranks; ``spec``
    and ``problem`` are then those of one mesh rank. order: indices of the cluster's devices as
    stages use them; by default in order. made: where stages form a graph with branches; ``problem``
    then has its blocks in their order. hosts: measured contention; by default the cluster's.
    """
    choice = solution.choice
    assert choice is not None, "a plan needs a choice"
    evaluation = (made and made.evaluation) or evaluate(problem, choice)
    mesh = Mesh() if shared is None else shared.mesh
    axes = {"data": 1, "tensor": 1} if shared is None else dict(mesh.axes)
    count = len(choice.starts) * mesh.size
    used_devices = tuple(order[:count]) or tuple(range(count))
    ranks = _ranks_of(used_devices, mesh.size)
    edges = with_directions(edges_of(spec), cluster, _names(cluster, used_devices, mesh.size))
    rows = tuple(
        rank_prediction(k, ranks[k], cost, shared, problem)
        for k, cost in enumerate(evaluation.stages)
    )
    loads = find_host_loads(cluster, used := sorted(used_devices))
    if hosts is not None:
        loads = complete_host_loads(hosts, cluster, used)
    kinds = [cluster.devices[device].model for device in used]
    branches = made.over if made else ""
    return Plan(
        model=model,
        cluster=cluster,
        cluster_hash=cluster.hash,
        mesh={"pipeline": len(choice.starts), **axes},
        stages=_stages(evaluation, problem.blocks, ranks, kinds, shared, spec),
        ties=ties_of(spec),
        batch_size=batch_size,
        microbatches=problem.variants[choice.variant].microbatches,
        schedule=choice.schedule,
        precision=precision_of(constraints),
        transfer_dtype=transfer_dtype_of(constraints),
        offload=offload_of(constraints),
        optimizer=optimizer,
        seed=spec.seed,
        prediction=_prediction(evaluation, schedule, edges, rows, loads),
        provenance=dict(provenance),
        certificate=_certificate(problem, solution, evaluation, provenance, mesh.size, branches),
        alternatives=_alternatives(problem, solution, evaluation, shared),
        constraints=dict(constraints),
        edges=tuple((e.source, e.target, e.backward) for e in edges),
        sharding=None if shared is None else shared.sharding,
        devices=() if max(used_devices) < count else tuple(used),
        order=made.order if made else (),
    )


def _stages(
    evaluation: PartitionEvaluation,
    names: Sequence[str],
    ranks: Sequence[tuple[int, ...]],
    kinds: Sequence[str],
    shared: ShardingSummary | None,
    spec: ProgramSpec,
) -> tuple[Stage, ...]:
    """Return the plan's stages. names: of the blocks in order; kinds: device model by rank."""
    data, tensor, expert, context = (1,) * 4 if shared is None else shared.degrees
    return tuple(
        Stage(
            index=k,
            first=cost.first,
            last=cost.last,
            label=label(names[cost.first : cost.last + 1]),
            ranks=ranks[k],
            data_parallel=data,
            tensor_parallel=tensor,
            expert_parallel=expert,
            context_parallel=context,
            zero=_zero(shared),
            shard_degree=0 if shared is None else shared.shard_degree,
            recompute=cost.recompute,
            device=kinds[ranks[k][0]],
            parameters=parameters_of(spec, k),
        )
        for k, cost in enumerate(evaluation.stages)
    )


def _names(cluster: Cluster, devices: Sequence[int], width: int) -> list[list[str]]:
    """Return the names of the devices of each stage."""
    names = [cluster.devices[device].name for device in devices]
    return [names[first : first + width] for first in range(0, len(names), width)]


def _ranks_of(devices: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Return the ranks of each stage in mesh order; ranks follow the devices' own order."""
    rank_of = {device: rank for rank, device in enumerate(sorted(devices))}
    ranks = [rank_of[device] for device in devices]
    return [tuple(ranks[first : first + width]) for first in range(0, len(ranks), width)]


def _zero(shared: ShardingSummary | None) -> Literal[0, 1, 2, 3]:
    """Return the ZeRO level, which is the same for all stages."""
    level = 0 if shared is None else shared.sharding.zero
    assert level in (0, 1, 2, 3)
    return cast(Literal[0, 1, 2, 3], level)


def parameters_of(spec: ProgramSpec, stage: int) -> int:
    """Return the number of elements of a stage's unsharded parameters."""
    whole = {} if spec.sharding is None else spec.sharding.state
    return sum(
        prod(whole[state.name].shape if state.name in whole else state.shape)
        for state in spec.stages[stage].state
        if state.kind == "parameter"
    )


def ties_of(spec: ProgramSpec) -> tuple[PlanTiedParameter, ...]:
    """Return the parameters that several stages of the program share."""
    others: dict[str, list[str]] = {}
    for alias, main in sorted(spec.aliases.items()):
        others.setdefault(main, []).append(alias)
    return tuple(
        PlanTiedParameter(
            names=(name, *others.get(name, [])), owner=stages[0], stages=tuple(sorted(stages))
        )
        for name, stages in sorted(spec.ties.items())
    )


def _prediction(
    evaluation: PartitionEvaluation,
    schedule: Schedule,
    edges: Sequence[StageEdge],
    rows: tuple[RankPrediction, ...],
    hosts: Sequence[HostLoad],
) -> Prediction:
    """Return the closed-form step time, and the simulated step with overlapped transfers."""
    count = schedule.microbatches
    fast = SCHEDULES[schedule.name].warmup is not None
    given = schedule.name if fast else (lambda: schedule)
    found = simulate_step(given, count, edges, rows, hosts, evaluation.seconds)
    return Prediction(
        step_seconds=evaluation.seconds,
        simulated_seconds=found.seconds,
        bubble=found.bubble,
        ranks=rows,
        hosts=found.hosts,
        method=found.method,
    )


def rank_prediction(
    stage: int,
    ranks: tuple[int, ...],
    cost: StageCost,
    shared: ShardingSummary | None,
    problem: PartitionProblem,
) -> RankPrediction:
    """Return the prediction for the ranks of one stage, which are predicted as its slowest.

    The part of the problem's ``once`` that is no gradient reduction is the runtime's overhead.
    """
    m = cost.memory
    sums = 0.0
    own = max(0.0, problem.once - (shared.sums.once if shared is not None else 0.0))
    if shared is not None:
        sums = shared.sums.once + fsum(shared.sums.by_block[cost.first : cost.last + 1])
    return RankPrediction(
        ranks=ranks,
        stage=stage,
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.backward_seconds,
        transfer_seconds=cost.transfer_seconds,
        sync_seconds=sums,
        tie_seconds=cost.sync_seconds,
        collective_seconds=cost.collective_seconds,
        optimizer_seconds=max(0.0, cost.optimizer_seconds - sums - own),
        overhead_seconds=own,
        memory=PeakMemory(
            weights=m.weights,
            gradients=m.gradients,
            optimizer=m.optimizer,
            activations=m.activations - problem.packed,
            buffers=m.buffers,
            transfers=m.transfers,
            sums=problem.packed,
        ),
        memory_limit=cost.memory_limit,
        in_flight=cost.in_flight,
        workspace=cost.workspace - problem.packed,
        update=cost.updating,
        host=cost.host,
    )


def _certificate(
    problem: PartitionProblem,
    solution: Solution,
    evaluation: PartitionEvaluation,
    provenance: Mapping[str, str],
    width: int,
    over: str,
) -> Certificate:
    """Return the certificate. over: the search space, by default contiguous stages."""
    objective = evaluation.seconds
    bound = min(solution.bound, objective)
    status = solution.status
    assert status in ("optimal", "within gap", "best found")
    counts = sorted({v.microbatches for v in problem.variants})
    devices = "devices" if width == 1 else f"groups of {width} devices"
    space = over or (
        f"contiguous stages of these {len(problem.blocks)} blocks on at most "
        f"{problem.max_stages} of {len(problem.devices)} {devices} in their order"
    )
    return Certificate(
        status=status,
        objective=objective,
        lower_bound=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        solver=solution.solver,
        over=(
            f"{space}, "
            f"microbatches of {', '.join(map(str, counts))}, schedules "
            f"{', '.join(problem.schedules)}{_describe_modes(problem)}, costs by "
            f"{provenance.get('compute', 'the cost model')}"
        ),
    )


def _describe_modes(problem: PartitionProblem) -> str:
    """Return the modes of recomputation that were compared, for the certificate."""
    if problem.recompute == ("none",):
        return ""
    return f", recompute {' or '.join(problem.recompute)} per stage"


def _alternatives(
    problem: PartitionProblem,
    solution: Solution,
    best: PartitionEvaluation,
    shared: ShardingSummary | None,
) -> tuple[Alternative, ...]:
    """Return the best five of the solver's other candidates."""
    assert solution.choice is not None, "a plan needs a choice"
    was = _parts(problem, solution.choice, best, shared)[0]
    rows = []
    for candidate in solution.candidates:
        if candidate == solution.choice:
            continue
        found = evaluate(problem, candidate)
        parts, stages = _parts(problem, candidate, found, shared)
        full = any(row.tensors > row.memory_limit for row in stages)
        rows.append(
            Alternative(
                stages=len(candidate.starts),
                microbatches=problem.variants[candidate.variant].microbatches,
                schedule=candidate.schedule,
                step_seconds=found.seconds if found.feasible else None,
                unfit_seconds=found.seconds if full else None,
                why=explain_rejection(was, parts, stages)
                if full or found.feasible
                else found.faults[0],
            )
        )
    return tuple(rows[:5])


def _parts(
    problem: PartitionProblem,
    choice: PartitionChoice,
    found: PartitionEvaluation,
    shared: ShardingSummary | None,
) -> tuple[StepParts, list[RankPrediction]]:
    """Return the components of the choice's step time, and its stages' predictions."""
    rows = [rank_prediction(k, (), cost, shared, problem) for k, cost in enumerate(found.stages)]
    count = problem.variants[choice.variant].microbatches
    fill = get_fill_fraction(choice.schedule, count, len(rows))
    return step_parts(rows, count, fill, found.seconds), rows


def model_info(captured: CapturedModel, graph: fx.GraphModule) -> PlanModel:
    """Return the plan's description of its model. graph: prepared, with blocks."""
    parameters = [captured.state[name] for name in captured.parameters]
    return PlanModel(
        name=captured.model_name,
        fingerprint=fingerprint(graph),
        capture=captured.method,
        batch="symbolic" if captured.symbolic else "fixed",
        nodes=sum(n.op.startswith("call") for n in graph.graph.nodes),
        blocks=len(graph.meta[BLOCKS_KEY]),
        parameters=sum(t.numel() for t in parameters),
        parameter_bytes=sum(t.numel() * t.element_size() for t in parameters),
        inputs=tuple(
            PlanInput(name=i.name, dtype=i.dtype, shape=i.shape, batch_dim=i.batch_dim)
            for i in captured.inputs
        ),
        work=count_model_work(captured, graph.graph),
    )
