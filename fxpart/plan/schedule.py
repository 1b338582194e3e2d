"""Make the schedule of a plan.

The schedule's ranks are the plan's stages; its stages are those of the program, of which a plan's
stage has several if it has virtual stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fxpart.cluster.link_index import LinkIndex
from fxpart.errors import error
from fxpart.schedule.action import Schedule, StageEdge
from fxpart.schedule.make import make
from fxpart.schedule.plan_actions import parse_plan_actions
from fxpart.schedule.spec import FOUND, find_built, list_built

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.plan.model import Plan


def stage_of(plan: Plan) -> tuple[int, ...]:
    """Return the plan's stage of each stage of the program."""
    return tuple(stage for _, _, stage in plan.program_stages)


def edges_of(plan: Plan) -> tuple[StageEdge, ...]:
    """Return the edges between the program's stages, for schedules."""
    edges = tuple(StageEdge(a, b, gradient) for a, b, gradient in plan.stage_edges)
    if has_even_links(plan.cluster):
        return edges
    devices = [[plan.device(r).name for r in plan.stages[k].ranks] for k in stage_of(plan)]
    return with_directions(edges, plan.cluster, devices)


def has_even_links(cluster: Cluster) -> bool:
    """Return whether every link has the bandwidth of the link back."""
    rates = {(link.source, link.target): link.bandwidth for link in cluster.links}
    return all(rates.get((target, source)) == rate for (source, target), rate in rates.items())


def with_directions(
    edges: Sequence[StageEdge], cluster: Cluster, devices: Sequence[Sequence[str]]
) -> tuple[StageEdge, ...]:
    """Return the edges with the parts of their transfer time that each direction takes.

    devices: the names of the devices of each stage. The parts are those of the seconds per byte on
    the slowest pair of links. Raises FXP403 where two devices have no link.
    """
    if has_even_links(cluster):
        return tuple(edges)
    links = LinkIndex(cluster)
    found = []
    for edge in edges:
        pairs = {
            (links.group(a), links.group(b)): (links(a, b), links(b, a))
            for a, b in zip(devices[edge.source], devices[edge.target], strict=False)
            if a != b
        }
        speeds = [(1 / there.bandwidth, 1 / back.bandwidth) for there, back in pairs.values()]
        there, back = max(speeds, key=sum, default=(1.0, 1.0))
        found.append(edge if there == back else replace(edge, outward=there / (there + back)))
    return tuple(found)


def plan_schedule(plan: Plan, name: str | None = None, microbatches: int | None = None) -> Schedule:
    """Return the plan's schedule with transfers, or another one, verified.

    microbatches: by default the plan's; a searched schedule has no more than those. Raises FXP109
    for unknown schedules, FXP303 for actions that cannot be parsed, FXP901 for unsafe ones.
    """
    name = plan.schedule if name is None else name
    count = plan.microbatches if microbatches is None else microbatches
    if find_built(name) is None and not (name == FOUND and plan.actions):
        fix = f"use one of {', '.join(list_built())}"
        raise error("FXP109", where="schedule", why=f"there is no schedule {name!r}", fix=fix)
    given = parse_schedule(plan) if name == plan.schedule else name
    return make(given, stage_of(plan), count, edges_of(plan), replicas=plan.replicas)


def parse_schedule(plan: Plan) -> Schedule | str:
    """Return the name of the plan's schedule, or the parsed actions of a searched one.

    Raises FXP303 where the plan's actions cannot be parsed.
    """
    if plan.schedule != FOUND:
        return plan.schedule
    return parse_plan_actions(plan.actions, stage_of(plan), plan.microbatches)


def recomputed(plan: Plan) -> dict[int, str]:
    """Return the recomputation mode of each stage of the program that recomputes."""
    modes = {stage.index: stage.recompute for stage in plan.stages}
    stages = enumerate(plan.program_stages)
    return {at: modes[stage] for at, (_, _, stage) in stages if modes[stage] != "none"}
