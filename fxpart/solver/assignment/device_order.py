"""Joint choice of the order of heterogeneous devices and the cuts between stages.

A partition problem has a fixed device order, stage k on device k. Here the order is a decision too,
and which devices stay unused. Links are between pairs of devices: the inputs of a stage are priced
by the worst link from any earlier device, because values may skip stages.
"""

from __future__ import annotations

from math import inf

import msgspec

from fxpart.errors import error
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.solution import Status


class _DeviceOrderStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class DeviceLinks(_DeviceOrderStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links between devices: latency in seconds and seconds per byte, [source][target]."""

    latency: tuple[tuple[float, ...], ...]
    inverse: tuple[tuple[float, ...], ...]

    def into(self, target: int, before: tuple[int, ...]) -> tuple[float, float]:
        """Return worst latency and the worst inverse bandwidth from any of the earlier devices."""
        return (
            max((self.latency[k][target] for k in before), default=0.0),
            max((self.inverse[k][target] for k in before), default=0.0),
        )


class DeviceOrderSolution(
    _DeviceOrderStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The ordered devices of the stages, and their cuts; bound <= optimum <= objective.

    order, choice: empty and None if nothing fits, or nothing was found.
    """

    status: Status
    order: tuple[int, ...]
    choice: PartitionChoice | None
    objective: float
    bound: float
    solver: str


def reorder_devices(
    problem: PartitionProblem, links: DeviceLinks, order: tuple[int, ...]
) -> PartitionProblem:
    """Return the problem on these devices in this order, with the resulting links."""
    devices = []
    for place, device in enumerate(order):
        latency, inverse = links.into(device, order[:place])
        given = {"latency": latency, "inverse_bandwidth": inverse}
        devices.append(msgspec.structs.replace(problem.devices[device], **given))
    most = min(problem.max_stages, len(order))
    return msgspec.structs.replace(problem, devices=tuple(devices), max_stages=most)


def with_stage_count(problem: PartitionProblem, stages: int) -> PartitionProblem:
    """Return the problem with this number of stages only."""
    return msgspec.structs.replace(problem, min_stages=stages, max_stages=stages)


def check_links(problem: PartitionProblem, links: DeviceLinks) -> None:
    """Raise FXP206 if the links are not one finite number for each pair of devices."""
    n = len(problem.devices)
    for name, table in (("latency", links.latency), ("inverse", links.inverse)):
        right = len(table) == n and all(len(row) == n for row in table)
        if not right or not all(0 <= x < inf for row in table for x in row):
            raise error(
                "FXP206",
                where=f"links.{name}",
                why=f"The table must have {n} by {n} finite nonnegative numbers.",
                fix="Specify one number for each pair of devices.",
            )
