"""The partition problem as numbers: what every solver is given. It can be archived as JSON.

Blocks 0..n-1 stand in a fixed topological order. A choice cuts them into contiguous, non-empty
stages; stage k runs on device k. Seconds and bytes everywhere.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fxpart.schedule.spec import DEFAULT_SCHEDULE


class _PartitionStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class DeviceLimit(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place for one stage. type: index into the per-type cost rows; memory: bytes usable.

    latency, inverse_bandwidth: seconds, and seconds per byte, of a transfer into this device from
    the worst of the devices before it (0 for the first device).
    """

    name: str
    type: int
    memory: int
    latency: float
    inverse_bandwidth: float


class BlockValue(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor made by block ``producer`` and used by ``consumers`` (later blocks, sorted).

    A stage that uses it without holding its producer receives it once for each microbatch, and
    returns a gradient of the same size where ``gradient`` holds. saved: its stage keeps it for the
    backward in any case (its bytes are in ``activation``, or it is a view of an input or a weight);
    otherwise a stage that sends it keeps it, once for each microbatch in flight. widened: how many
    times the bytes that are sent are kept (2 where float32 is sent as bfloat16).
    """

    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    saved: bool = True
    widened: int = 1


# A sparse gradient is there as it came, and in order and summed when the optimizer asks for it.
SPARSE_COPIES = 2


class Weight(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter or buffer used by ``blocks`` (sorted). More than one block makes it a tie.

    A stage that holds any of the blocks holds a copy: bytes of weight, gradient and optimizer
    state. If blocks lie on several stages and ``gradient`` is not 0, gradients are summed over them
    microbatch by microbatch, and the sum comes back once a step: each holding stage pays
    (m + 1) * (latency + gradient * inverse_bandwidth) a step for the variant's m microbatches, of
    the link into its own device (the first stage: into the second device). So a stage's cost
    depends on its own blocks and device alone. That the m messages overlap computation is not
    counted on. A buffer's bytes are in ``weight``. sparse: the gradient is of the rows that a step
    asks for, which it counts SPARSE_COPIES times, and the optimizer looks at those alone.
    temporary: bytes that the optimizer takes for a moment while it updates the weight, when the
    pass's activations are gone; one weight follows the other.
    """

    name: str
    blocks: tuple[int, ...]
    weight: int
    gradient: int
    optimizer: int
    buffer: bool = False
    sparse: bool = False
    temporary: int = 0

    @property
    def rows(self) -> int:
        """Bytes of a sparse gradient as it travels; 0 of a dense one."""
        return self.gradient // SPARSE_COPIES if self.sparse else 0


class Variant(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs at one microbatch size.

    forward, backward: seconds, [device type][block]. activation: bytes that autograd saves,
    [block]; what several blocks save counts where it is made. workspace: bytes live only while the
    block runs, [block]. value_bytes: as sent, [value]. collective: of forward and backward
    together the seconds in which the ranks of a stage talk, [block]; empty where there are none.
    """

    microbatch_size: int
    microbatches: int
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    activation: tuple[int, ...]
    workspace: tuple[int, ...]
    value_bytes: tuple[int, ...]
    collective: tuple[float, ...] = ()


class PartitionProblem(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    no_cut_after: blocks i such that no stage may end after block i (e.g. data-dependent shapes
    would cross). step: optimizer seconds, [device type][block]; once: seconds that every stage
    takes beside that, once a step; action: that it takes beside its blocks for each forward and
    for each backward of a microbatch (the runtime's own). schedules: those to choose from.
    min_stages, max_stages bound the number of stages (max_stages <= len(devices)). packed: bytes
    that are part of each block's workspace, for gradients that are packed while it runs.
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


class PartitionChoice(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate plan: variant, schedule, and the first block of each stage (starts[0] = 0)."""

    variant: int
    schedule: str
    starts: tuple[int, ...]


class Solution(_PartitionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A solver's answer. bound <= optimum <= objective; choice None means infeasible or unknown.

    objective, bound: seconds; infinite where there is no choice (bound stays finite if unknown).
    status: "optimal" to a relative 1e-6, "within gap" to 1 %. candidates: the choice first, then
    the best others that differ in number of stages, microbatches or schedule.
    """

    status: Literal["optimal", "within gap", "best found", "infeasible", "unknown"]
    choice: PartitionChoice | None
    objective: float
    bound: float
    solver: str
    candidates: tuple[PartitionChoice, ...] = ()
