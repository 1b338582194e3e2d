"""A plan's microbatches from queues, played in time by what is predicted of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.plan.contention import is_crowded
from fxpart.plan.schedule import edges_of, plan_schedule
from fxpart.planner.prediction.step_simulation import StageTimes, steps_in_time
from fxpart.schedule.action import list_group_stages
from fxpart.schedule.host_contention import build_host_contention
from fxpart.schedule.queues.dispatcher import Queues
from fxpart.schedule.queues.simulate import QueueRun, QueueTimes, simulate_queues

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

_WORD = 3e-4  # seconds of a message of some bytes between processes, at least
MOST = 64  # copies times microbatches of a plan that is played through


def groups_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Each stage with its copies, ascending."""
    rounds = {group[0]: tuple(sorted(list_group_stages(group))) for group in plan.replicas}
    return tuple(rounds.get(first, (first,)) for first in plan.firsts)


def queues_of(plan: Plan) -> Queues:
    """What flows between the groups of a plan, and how much each copy keeps."""
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
    """The plan's minibatches from queues, by staleness of each group.

    Each rank computes as if it were alone on its host, as :func:`compute_round_robin_seconds` does.
    """
    rows, edges = plan.prediction.ranks, edges_of(plan)
    times = StageTimes.of(rows, edges, None, plan.replicas)
    hosts = [load for load in plan.prediction.hosts if is_crowded(load)]
    crowd = build_host_contention(hosts, plan.world) if hosts else None
    pace = {
        k: 1.0
        if crowd is None
        else crowd.factor(crowd.host[mine[0]], 1) / max(crowd.full(mine[0]), 1e-12)
        for k, mine in enumerate(times.ranks)
    }
    own = {k: times.once[k] - times.summing[k] for k in pace}

    def moved(a: int, b: int) -> float:
        """As predicted, and through the threads at both ends."""
        return times.transfer.get((a, b), times.transfer.get((b, a), 0.0)) + 2 * _WORD

    return simulate_queues(
        queues_of(plan),
        staleness,
        QueueTimes(
            forward={k: pace[k] * times.forward[k] for k in pace},
            backward={k: pace[k] * times.backward[k] for k in pace},
            sums={k: times.summing[k] for k in pace},
            once={k: pace[k] * own[k] for k in pace},
            transfer=moved,
            word={k: _word(plan, mine[0]) for k, mine in enumerate(times.ranks)},
        ),
        plan.microbatches,
    )


def _word(plan: Plan, rank: int) -> float:
    """Seconds of a message between a rank and the dispatcher, which is rank 0's."""
    if rank == 0:
        return 0.0
    return max(_WORD, plan.cluster.link(plan.device(0), plan.device(rank)).latency)


def compute_round_robin_seconds(plan: Plan) -> float:
    """Seconds of a step in which copies take turns, each rank as if it were alone on its host."""
    edges, rows, hosts = edges_of(plan), plan.prediction.ranks, plan.prediction.hosts
    found = steps_in_time(plan_schedule(plan), edges, rows, hosts, contention=False)
    return found.steady_seconds
