"""Assign devices to the stages of a joint choice by their traffic over the cluster's links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fxpart.pricing.topology import (
    StageDevicePlacement,
    Traffic,
    place_stages,
    pools_of,
    topology_of,
)
from fxpart.solver.assignment.problem import StageFlow
from fxpart.solver.joint.objective import JointScorer
from fxpart.solver.joint.problem import JointChoice, JointProblem, count_microbatch_rows
from fxpart.solver.objective import count_tied_reduction_messages
from fxpart.solver.schedule_costs import get_fill_fraction

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster


@dataclass(frozen=True)
class StageAssignment:
    """Device assignment and fixed stage boundaries.

    order: indices of all devices of the cluster in the order in which stages use them; None keeps
    the cluster's order. starts: the first block of each stage; None leaves the boundaries to the
    solver. microbatches, stages: the expected numbers, for which placements over the mesh are
    selected; None: unknown. limit: the largest number of stages; only as many groups of devices are
    priced. None: as many as the cluster has devices for.
    """

    order: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    microbatches: int | None = None
    stages: int | None = None
    limit: int | None = None

    def ordered(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its devices in this order."""
        if self.order is None:
            return cluster
        devices = tuple(cluster.devices[i] for i in self.order)
        return msgspec.structs.replace(cluster, devices=devices)

    def priced(self, cluster: Cluster, width: int) -> Cluster:
        """Return the devices of the most stages of ``width`` ranks, in this order."""
        ordered = self.ordered(cluster)
        if self.limit is None:
            return ordered
        return msgspec.structs.replace(ordered, devices=ordered.devices[: self.limit * width])

    def used(self, cluster: Cluster, width: int) -> Cluster:
        """Return the devices of the expected stages of ``width`` ranks, in this order.

        All devices where the number of stages is unknown.
        """
        ordered = self.priced(cluster, width)
        if self.order is None or self.stages is None:
            return ordered
        return msgspec.structs.replace(ordered, devices=ordered.devices[: self.stages * width])


def traffic(problem: JointProblem, choice: JointChoice) -> Traffic:
    """Return the communication between the choice's stages and their device-independent times.

    Collectives within a stage stay in its seconds: they are priced for the worst ring that its
    replicas can form.
    """
    count, m = len(choice.options), choice.microbatches
    stage_of = [
        (sum(start <= block for start in choice.starts) - 1) % count
        for block in range(len(problem.blocks))
    ]
    flows = []
    for value in (value for value in problem.boundaries if value.sent):
        home = stage_of[value.producer]
        for target in sorted({stage_of[c] for c in value.consumers} - {home}):
            rows = count_microbatch_rows(
                problem.batch, m, problem.options[choice.options[target]].data
            )
            size = value.row_bytes * rows + value.fixed_bytes
            flows.append(StageFlow(source=home, target=target, size=size, back=value.gradient))
    for index, tie in enumerate(problem.ties):
        holders = sorted({stage_of[block] for block in tie.blocks})
        for target in holders[1:] if not tie.buffer else ():
            layout = problem.layouts[problem.options[choice.options[target]].layout]
            messages = count_tied_reduction_messages(m)
            size = messages * layout.tie_gradient[index]
            flows.append(
                StageFlow(source=holders[0], target=target, size=size, messages=messages, step=True)
            )
    stages = JointScorer(problem).evaluate(choice).stages
    return Traffic(
        flows=tuple(flows),
        seconds=tuple(s.seconds - s.transfer_seconds for s in stages),
        once=tuple(s.reduce_seconds + s.optimizer_seconds for s in stages),
        microbatches=m,
        fill=get_fill_fraction(choice.schedule, m, len(stages), choice.virtual),
    )


def assign_devices(
    cluster: Cluster, problem: JointProblem, choice: JointChoice
) -> StageDevicePlacement | None:
    """Return the devices of each stage; None where the cluster's order is as good as any.

    That is the case where all devices and all links between hosts are equal.
    """
    pools = pools_of(cluster)
    widths = []
    for index in choice.options:
        option = problem.options[index]
        widths.append((option.pool, option.data, problem.layouts[option.layout].tensor))
    moved = traffic(problem, choice)
    if len(set(pools)) == 1:
        topology, _ = topology_of(cluster, widths, moved)
        if len(topology.inside) == 1:
            return None
    return place_stages(cluster, widths, moved)


def order_of(cluster: Cluster, placement: StageDevicePlacement) -> tuple[int, ...]:
    """Return all devices: those of the stages in the stages' order, then the unused ones."""
    used = [device for ranks in placement.ranks for device in ranks]
    used_set = set(used)
    return (*used, *(d for d in range(len(cluster.devices)) if d not in used_set))
