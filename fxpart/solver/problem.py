"""The partition problem as numbers, the input of every solver. It can be archived as JSON.

Blocks 0..n-1 are in a fixed topological order. A choice cuts them into contiguous, non-empty
stages; stage k runs on device k. All units are seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from fxpart.plan.offload import Offload
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.solver.solution import SolverResult

Recompute = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "selective", "full")


class _PartitionStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class DeviceLimit(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device for one stage. type: index into the per-type cost rows; memory: usable bytes.

    latency, inverse_bandwidth: seconds, and seconds per byte, of a transfer into this device from
    the worst of the earlier devices (0 for the first device).
    """

    name: str
    type: int
    memory: int
    latency: float
    inverse_bandwidth: float


class BlockValue(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor made by block ``producer`` and used by ``consumers`` (later blocks, sorted).

    A stage that uses it without its producer receives it per microbatch, and returns a gradient of
    the same size if ``gradient`` is set. saved: its stage stores it for the backward in any case
    (its bytes are in ``activation``, or it is a view of an input or a weight); otherwise a stage
    that sends it stores it, per microbatch in flight. widened: ratio of stored to sent bytes (2 if
    float32 is sent as bfloat16). sent: False if each of these stages computes the value itself, and
    only stores it (:mod:`fxpart.compiler.duplicated_ops`).
    """

    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    saved: bool = True
    widened: int = 1
    sent: bool = True

    @property
    def trips(self) -> int:
        """Return the messages per microbatch to a stage that uses it, with the gradient's."""
        return (2 if self.gradient else 1) if self.sent else 0


# A sparse gradient exists as received, and coalesced when the optimizer uses it.
SPARSE_COPIES = 2


class Weight(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter or buffer used by ``blocks`` (sorted). More than one block makes it a tie.

    A stage with any of the blocks has a copy: bytes of weight, gradient and optimizer state. If the
    blocks are on several stages and ``gradient`` is not 0, gradients are reduced over them
    microbatch by microbatch, and the sum returns per step: each of these stages pays (m + 1) *
    (latency + gradient * inverse_bandwidth) per step for the variant's m microbatches, of the link
    into its own device (the first stage: into the second device). So a stage's cost depends only on
    its own blocks and device. The overlap of the m messages with computation is ignored. A buffer's
    bytes are in ``weight``. sparse: the gradient has only the rows that a step uses, counted
    SPARSE_COPIES times, and the optimizer updates only those. temporary: bytes that the optimizer
    allocates while it updates the weight, when the activations are freed; weights are updated one
    after the other. host: bytes in host memory under offload; copied: those of them that cross the
    link to the host per step.
    """

    name: str
    blocks: tuple[int, ...]
    weight: int
    gradient: int
    optimizer: int
    buffer: bool = False
    sparse: bool = False
    temporary: int = 0
    host: int = 0
    copied: int = 0

    @property
    def rows(self) -> int:
        """Return the bytes of a sparse gradient in a message; 0 for a dense one."""
        return self.gradient // SPARSE_COPIES if self.sparse else 0


class Recomputation(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a stage that recomputes activations, beside those of its variant.

    mode: "selective" or "full". seconds: additional backward time, [device type][block].
    collective: the collectives' share of it, [block]; empty if there is none. activation: bytes
    stored per microbatch in flight, with the values that later blocks use, whether or not they are
    sent, [block]. workspace: bytes live only while the block runs, with its recomputed tensors,
    [block].
    """

    mode: Literal["selective", "full"]
    seconds: tuple[tuple[float, ...], ...]
    activation: tuple[int, ...]
    workspace: tuple[int, ...]
    collective: tuple[float, ...] = ()


class SplitBackward(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a stage whose backwards are split in two, beside those of its variant.

    seconds: additional backward time, [device type][block]. kept: bytes of a microbatch between the
    two halves, [block]: operands of products, and the gradients of their results.
    """

    seconds: tuple[tuple[float, ...], ...]
    kept: tuple[int, ...]

    def count_more(self, activation: Sequence[int], blocks: Iterable[int]) -> int:
        """Return the bytes by which blocks keep more between the halves than their activations."""
        return sum(max(0, self.kept[block] - activation[block]) for block in blocks)


class Variant(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs at one microbatch size.

    forward, backward: seconds, [device type][block]. activation: bytes that autograd saves,
    [block]; tensors saved by several blocks count in the block that makes them. workspace: bytes
    live only while the block runs, [block]. value_bytes: as sent, [value], or as stored for values
    that are not sent. collective:
    communication time between the ranks of a stage, in forward and backward together, [block];
    empty if there is none. recompute: the modes of recomputation whose costs are known. split: of a
    schedule that splits backwards; None if there are none. offloaded: bytes of a microbatch in
    flight that wait in host memory, [block]; empty if there are none. largest: bytes of the largest
    tensor that autograd saves.
    """

    microbatch_size: int
    microbatches: int
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    activation: tuple[int, ...]
    workspace: tuple[int, ...]
    value_bytes: tuple[int, ...]
    collective: tuple[float, ...] = ()
    recompute: tuple[Recomputation, ...] = ()
    split: SplitBackward | None = None
    offloaded: tuple[int, ...] = ()
    largest: int = 0


class PartitionProblem(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    no_cut_after: blocks i such that no stage may end after block i (e.g. data-dependent shapes
    would cross). step: optimizer seconds, [device type][block]. once: additional seconds of every
    stage per step. action: additional seconds of the runtime for each forward and each backward of
    a microbatch. schedules: the candidates. min_stages, max_stages bound the number of stages
    (max_stages <= len(devices)). packed: bytes within each block's workspace for gradients that are
    packed while it runs. recompute: the modes that stages may use, "none" among them or not. Each
    stage uses the fastest one that fits: that is never worse, because a mode changes nothing but
    the stage's own seconds and bytes. So a choice does not state it. offloads: that
    remedies may name.
    """

    blocks: tuple[str, ...]
    devices: tuple[DeviceLimit, ...]
    values: tuple[BlockValue, ...]
    weights: tuple[Weight, ...]
    variants: tuple[Variant, ...]
    step: tuple[tuple[float, ...], ...]
    once: float = 0.0
    action: float = 0.0
    no_cut_after: tuple[int, ...] = ()
    schedules: tuple[str, ...] = (DEFAULT_SCHEDULE,)
    min_stages: int = 1
    max_stages: int = 1
    packed: int = 0
    recompute: tuple[Recompute, ...] = ("none",)
    offloads: tuple[Offload, ...] = ()


def without_recompute(problem: PartitionProblem) -> PartitionProblem:
    """Return the problem whose stages store all activations, for solvers that know no other."""
    if problem.recompute == ("none",):
        return problem
    return msgspec.structs.replace(problem, recompute=("none",))


class PartitionChoice(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate plan: variant, schedule, and the first block of each stage (starts[0] = 0)."""

    variant: int
    schedule: str
    starts: tuple[int, ...]


Solution: TypeAlias = SolverResult[PartitionChoice]
