"""Simulate a plan's queues from the predictions of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.plan.contention import has_contention
from fxpart.plan.schedule import edges_of, plan_schedule
from fxpart.planner.prediction.step_simulation import StageTimes, simulate_plan_steps
from fxpart.schedule.action import list_group_stages
from fxpart.schedule.host_contention import build_host_contention
from fxpart.schedule.queues.dispatcher import Queues
from fxpart.schedule.queues.simulate import QueueRun, QueueTimes, simulate_queues

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

_MESSAGE_SECONDS = 3e-4  # least seconds of a small message between processes
MAX_SIMULATED = 64  # replicas times microbatches of a plan that is simulated


def groups_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return each stage with its replicas, ascending."""
    rounds = {group[0]: tuple(sorted(list_group_stages(group))) for group in plan.replicas}
    return tuple(rounds.get(first, (first,)) for first in plan.firsts)


def queues_of(plan: Plan) -> Queues:
    """Return the queues between the groups of a plan, and how much each replica stores."""
    groups = groups_of(plan)
    of = {copy: g for g, group in enumerate(groups) for copy in group}
    pairs = sorted({(of[e.source], of[e.target]) for e in edges_of(plan)})
    back = sorted({(of[e.source], of[e.target]) for e in edges_of(plan) if e.backward})
    rows = {row.stage: row for row in plan.prediction.ranks}
    trains = tuple(rows[group[0]].backward_seconds > 0 for group in groups)
    ties = [{of[stage] for stage in tie.stages if trains[of[stage]]} for tie in plan.ties]
    return Queues(
        groups,
        tuple(tuple(a for a, b in pairs if b == g) for g in range(len(groups))),
        tuple(tuple(b for a, b in back if a == g) for g in range(len(groups))),
        trains,
        {copy: max(1, rows[copy].in_flight) for copy in of},
        tuple(
            tuple(sorted({other for tie in ties if g in tie for other in tie} - {g}))
            for g in range(len(groups))
        ),
    )


def simulate_queue_plan(plan: Plan, staleness: Sequence[int]) -> QueueRun:
    """Simulate the plan's minibatches from queues, by staleness of each group.

    Each rank computes as if it were alone on its host, as in :func:`compute_round_robin_seconds`.
    """
    rows, edges = plan.prediction.ranks, edges_of(plan)
    times = StageTimes.of(rows, edges, None, plan.replicas)
    hosts = [load for load in plan.prediction.hosts if has_contention(load)]
    contention = build_host_contention(hosts, plan.world) if hosts else None
    pace = {
        k: 1.0
        if contention is None
        else contention.factor(contention.host[mine[0]], 1) / max(contention.full(mine[0]), 1e-12)
        for k, mine in enumerate(times.ranks)
    }
    own = {k: times.once[k] - times.reduction[k] for k in pace}

    def moved(a: int, b: int) -> float:
        """Return the predicted transfer time plus a message to the threads at both ends."""
        return times.transfer.get((a, b), times.transfer.get((b, a), 0.0)) + 2 * _MESSAGE_SECONDS

    return simulate_queues(
        queues_of(plan),
        staleness,
        QueueTimes(
            forward={k: pace[k] * times.forward[k] for k in pace},
            backward={k: pace[k] * times.backward[k] for k in pace},
            gradient_exchange={k: times.reduction[k] for k in pace},
            update={k: pace[k] * own[k] for k in pace},
            transfer=moved,
            message_latency={
                k: _message_seconds(plan, mine[0]) for k, mine in enumerate(times.ranks)
            },
        ),
        plan.microbatches,
    )


def _message_seconds(plan: Plan, rank: int) -> float:
    """Return the seconds of a message between a rank and the dispatcher, which is on rank 0."""
    if rank == 0:
        return 0.0
    return max(_MESSAGE_SECONDS, plan.cluster.link(plan.device(0), plan.device(rank)).latency)


def compute_round_robin_seconds(plan: Plan) -> float:
    """Return the step time with round-robin routing, each rank as if alone on its host."""
    edges, rows, hosts = edges_of(plan), plan.prediction.ranks, plan.prediction.hosts
    found = simulate_plan_steps(plan_schedule(plan), edges, rows, hosts, contention=False)
    return found.steady_seconds
