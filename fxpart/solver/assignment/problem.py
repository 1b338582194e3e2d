"""Device assignment of stages as numbers: messages and links.

Devices belong to *domains*: the devices of one host with identical links, or a single device that a
link names. Domains of one *class* have equal links, so that 16,384 devices are a few thousand
domains of a few classes, and links are a small table by class. All units are seconds and bytes.
"""

from __future__ import annotations

import msgspec

from fxpart.solver.joint.problem import LinearCost
from fxpart.solver.solution import Status

__all__ = [
    "AssignmentProblem",
    "AssignmentSolution",
    "AssignmentStage",
    "DeviceAssignment",
    "InterconnectDomain",
    "LinearCost",
    "RingCollective",
    "StageFlow",
]

DeviceAssignment = tuple[tuple[int, ...], ...]  # by stage, the domain of each mesh rank


class _AssignmentStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class RingCollective(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective: ``size`` bytes over each link of a ring of ranks, in ``messages`` messages."""

    size: float = 0.0
    messages: float = 0.0


class AssignmentStage(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage: data * tensor mesh ranks on devices of one pool; mesh rank = replica * tensor +
    shard.

    seconds, once: its cost anywhere, per microbatch and per step. exchange: the tensor shards'
    collectives of one microbatch, among consecutive mesh ranks. reduce: the replicas' collectives
    of one step, among mesh ranks of equal shard.
    """

    pool: int = 0
    data: int = 1
    tensor: int = 1
    seconds: float = 0.0
    once: float = 0.0
    exchange: RingCollective = RingCollective()
    reduce: RingCollective = RingCollective()

    @property
    def mesh_ranks(self) -> int:
        """Return the number of its devices."""
        return self.data * self.tensor


class StageFlow(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that stage ``target`` receives from stage ``source``, and is charged for.

    size: bytes that each of its mesh ranks receives, in ``messages`` messages; back: the same
    amount returns. step: per step (tied-parameter gradient reduction), else per microbatch.
    """

    source: int
    target: int
    size: float
    messages: float = 1.0
    back: bool = False
    step: bool = False


class InterconnectDomain(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices with identical links: their host, link class, and number by pool.

    Two domains of one class differ only in host and devices.
    """

    host: int
    kind: int
    devices: tuple[int, ...]


class AssignmentProblem(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    inside: the link of two devices of a domain, by class. between: of devices in two domains, by
    class of the source and of the target. uplinks: by host, seconds per byte that leaves or enters
    it over the network adapter that its devices share; 0: each device has its own. fill: the share
    of the pipeline's filling that the schedule cannot hide, 1 for 1F1B.
    """

    groups: tuple[AssignmentStage, ...]
    flows: tuple[StageFlow, ...]
    places: tuple[InterconnectDomain, ...]
    inside: tuple[LinearCost, ...]
    between: tuple[tuple[LinearCost, ...], ...]
    uplinks: tuple[float, ...]
    microbatches: int = 1
    fill: float = 1.0


class AssignmentSolution(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Domains by stage and mesh rank, the step time, and a bound: bound <= optimum <= seconds.

    assignment is empty if the stages do not fit ("infeasible"); solver: which one found it.
    """

    status: Status
    assignment: DeviceAssignment
    seconds: float
    bound: float
    solver: str
