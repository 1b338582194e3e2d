"""The order in which stages use heterogeneous devices: input and output of the order solver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpart import costmodels
from fxpart.cluster.link_index import LinkIndex
from fxpart.pricing.device_groups import group_devices
from fxpart.pricing.device_limits import line
from fxpart.solver.assignment.device_order import (
    DeviceLinks,
    DeviceOrderSolution,
    reorder_devices,
)
from fxpart.solver.assignment.device_order_dp import DeviceClasses
from fxpart.solver.assignment.device_order_search import solve_orders

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.costs import CostModel
    from fxpart.solver.problem import PartitionProblem

MOST = 64  # devices, or groups of them, up to which the order is searched
WORK = 2e7  # work limit of the exact search: a few seconds
ROUNDS = 30  # round limit of the local search


def device_links(cluster: Cluster, model: CostModel) -> DeviceLinks:
    """Return the model's transfers between any two devices; FXP403 where two have no link."""
    links = LinkIndex(cluster)
    names = [device.name for device in cluster.devices]
    known: dict[tuple[str, str, bool], tuple[float, float]] = {}
    rows: list[list[tuple[float, float]]] = []
    for a in names:
        row = []
        for b in names:
            key = (links.group(a), links.group(b), a == b)
            if key not in known:
                known[key] = (0.0, 0.0) if a == b else line(model, links, a, b)
            row.append(known[key])
        rows.append(row)
    return DeviceLinks(
        latency=tuple(tuple(one[0] for one in row) for row in rows),
        inverse=tuple(tuple(one[1] for one in row) for row in rows),
    )


def best_order(
    problem: PartitionProblem,
    cluster: Cluster,
    cost_model: str | CostModel,
    *,
    group_size: int = 1,
    time_limit: float = 30.0,
) -> tuple[DeviceOrderSolution, tuple[int, ...], PartitionProblem] | None:
    """Return a better order of the devices than the cluster's own, for a problem priced on that.

    group_size: number of consecutive devices per device of the problem. Returns the certified
    solution, all devices of the cluster in the new order, and the problem in that order; None where
    no order is better, all devices are equal, or there are more than :data:`MOST`.
    """
    model = costmodels.find(cost_model, cluster) if isinstance(cost_model, str) else cost_model
    groups = group_devices(cluster, group_size)
    if not 1 < len(problem.devices) <= MOST or len(groups.devices) != len(problem.devices):
        return None
    links = device_links(groups, model)
    fleet = DeviceClasses(problem, links)
    if len(fleet.classes) == 1:
        return None
    found = solve_orders(problem, links, time_limit=time_limit, work=WORK, rounds=ROUNDS)
    every = range(len(problem.devices))
    order = (*found.order, *(k for k in every if k not in found.order))
    if found.choice is None or order == tuple(every):
        return None
    devices = [k * group_size + mesh_rank for k in order for mesh_rank in range(group_size)]
    devices += range(len(devices), len(cluster.devices))
    return found, tuple(devices), reorder_devices(problem, links, order)
