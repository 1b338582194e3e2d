"""The problem of replicated stages as numbers: contiguous groups of blocks on mixed devices.

A *kind* is a set of devices with equal costs, memory and links. A choice cuts the blocks into
groups and gives each group some devices of each kind. Every device of a group is a *replica* of its
stage and runs whole microbatches in round-robin order, a faster one more of them.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fxpart.solver.problem import DeviceLimit, PartitionProblem
from fxpart.solver.solution import SolverResult


class _ReplicatedChainStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class DeviceKind(_ReplicatedChainStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of devices of one type (the row of the problem's costs), memory in bytes, and link.

    latency, inverse_bandwidth: seconds, and seconds per byte, of a transfer into one of them over
    the worst possible link from another device.
    """

    name: str
    type: int
    devices: int
    memory: int
    latency: float = 0.0
    inverse_bandwidth: float = 0.0


class ReplicatedChainProblem(
    _ReplicatedChainStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """base: costs of the blocks by type of device; its own devices are ignored.

    ``base.min_stages`` and ``max_stages`` bound the number of groups; schedules as in ``base``.
    ranks: the number of devices of all groups together, 0 for any number.
    """

    base: PartitionProblem
    kinds: tuple[DeviceKind, ...]
    ranks: int = 0

    @property
    def by_kind(self) -> PartitionProblem:
        """Return the same problem with a device for each kind, so that kind k is device k + 1.

        The first kind occurs twice, because a problem's first device has no incoming link.
        """
        places = [
            DeviceLimit(
                name=kind.name,
                type=kind.type,
                memory=kind.memory,
                latency=kind.latency,
                inverse_bandwidth=kind.inverse_bandwidth,
            )
            for kind in (self.kinds[0], *self.kinds)
        ]
        return msgspec.structs.replace(
            self.base, devices=tuple(places), min_stages=1, max_stages=len(places)
        )


class ReplicatedChainChoice(
    _ReplicatedChainStruct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A candidate: the first block of each group (starts[0] = 0), and its devices by kind."""

    variant: int
    schedule: str
    starts: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


ReplicatedChainSolution: TypeAlias = SolverResult[ReplicatedChainChoice]
