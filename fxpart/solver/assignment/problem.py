"""Placement of stages on devices as numbers: what moves, and over what.

Devices stand in *places*: those of one host that no link tells apart, or a single device that a
link names. Places of one *class* have equal links, so that 16,384 devices are a few thousand places
of a handful of classes, and links are a small table by class. Seconds and bytes everywhere.
"""

from __future__ import annotations

import msgspec

from fxpart.solver.joint.problem import LinearCost, Status

__all__ = [
    "AssignmentProblem",
    "AssignmentSolution",
    "AssignmentStage",
    "InterconnectDomain",
    "LinearCost",
    "RingCollective",
    "Seats",
    "StageFlow",
]

Seats = tuple[tuple[int, ...], ...]  # of each stage, the place of each lane


class _AssignmentStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class RingCollective(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective: ``size`` bytes over each link of a ring of ranks, in ``messages`` messages."""

    size: float = 0.0
    messages: float = 0.0


class AssignmentStage(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage: data * tensor lanes on devices of one pool; lane = replica * tensor + shard.

    seconds, once: what it costs wherever it is, for each microbatch and each step. exchange: the
    tensor shards' collectives of one microbatch, among consecutive lanes. reduce: the replicas'
    collectives of one step, among lanes of equal shard.
    """

    pool: int = 0
    data: int = 1
    tensor: int = 1
    seconds: float = 0.0
    once: float = 0.0
    exchange: RingCollective = RingCollective()
    reduce: RingCollective = RingCollective()

    @property
    def lanes(self) -> int:
        """How many devices it takes."""
        return self.data * self.tensor


class StageFlow(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stage ``target`` receives from stage ``source``, and pays for.

    size: bytes that each of its lanes receives, in ``messages`` messages; back: as much returns.
    step: once a step (sums over ties), else for each microbatch.
    """

    source: int
    target: int
    size: float
    messages: float = 1.0
    back: bool = False
    step: bool = False


class InterconnectDomain(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that no link tells apart: on which host, of which class of links, how many by pool.

    Two places of one class differ in nothing but host and devices.
    """

    host: int
    kind: int
    devices: tuple[int, ...]


class AssignmentProblem(_AssignmentStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    inside: the link of two devices of a place, by class. between: of devices in two places, by
    class of the source and of the target. uplinks: by host, seconds for each byte that leaves or
    enters it, all its devices together (a network card that they share); 0: each has its own.
    fill: the share of the pipeline's filling that the schedule cannot hide, 1 for 1F1B.
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
    """Places by stage and lane, the step's seconds, and a bound: bound <= optimum <= seconds.

    seats is empty where the stages do not fit ("infeasible"); solver: which one found it.
    """

    status: Status
    seats: Seats
    seconds: float
    bound: float
    solver: str
