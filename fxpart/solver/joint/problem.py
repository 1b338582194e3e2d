"""The joint problem as numbers, archived as JSON: everything that a plan decides at once.

Blocks 0..n-1 stand in a fixed topological order. Blocks that cost the same are of one *kind*, and
all tables are by kind, so that 96 equal layers cost one. A choice cuts the blocks into contiguous
stages and gives each stage an *option*: how many devices of which pool, and how they share its
work. Seconds and bytes everywhere.

Where a :class:`~fxpart.solver.problem.PartitionProblem` has its degrees fixed and prices the graph
of one rank exactly, this problem prices each kind of block by itself for each tensor and expert
degree, with the batch cut over the data replicas. It is what chooses those degrees.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import STASH

Recompute: TypeAlias = Literal["none", "selective", "full"]
Status: TypeAlias = Literal["optimal", "within gap", "best found", "infeasible", "unknown"]


class _JointStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class LinearCost(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds as a straight line in bytes: ``latency + inverse * bytes``, and 0 for 0 bytes."""

    latency: float = 0.0
    inverse: float = 0.0

    def __call__(self, size: float) -> float:
        """Seconds for ``size`` bytes."""
        return self.latency + self.inverse * size if size > 0 else 0.0


class Pool(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of one type: how many, bytes usable on each, and how many share a host.

    transfer: of a value into a stage on this pool from another stage, over the worst link that may
    lie between (nothing to pay where the cluster is one device).
    """

    name: str
    devices: int
    memory: int
    host: int = 1
    transfer: LinearCost = LinearCost()


class ParameterFootprint(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that one rank holds of parameters, by kind of block, before ZeRO; and their step.

    step: optimizer seconds, [pool][kind]. unsent: of the gradients' bytes those that sums over
    replicas do not move, at most ``gradient``: of rows of tables what an all-reduce would move and
    a gathering does not. Empty: none.
    """

    weight: tuple[int, ...]
    gradient: tuple[int, ...]
    optimizer: tuple[int, ...]
    step: tuple[tuple[float, ...], ...]
    unsent: tuple[int, ...] = ()


class ParallelLayout(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ``tensor`` ranks share each block, and ``expert`` data replicas its experts.

    dense: parameters that every data replica has whole (their gradients are summed over all of
    them); experts: parameters of which each of ``expert`` replicas has a part (summed over
    data / expert replicas), None where expert is 1 (then they are among ``dense``). buffer: bytes
    by kind. tie_weight, tie_gradient, tie_optimizer: bytes on one rank, by tie of the problem;
    tied parameters are in no other table, except that their optimizer seconds are in the ``step``
    of the kind of their first block.
    """

    tensor: int
    expert: int = 1
    dense: ParameterFootprint
    experts: ParameterFootprint | None = None
    buffer: tuple[int, ...]
    tie_weight: tuple[int, ...] = ()
    tie_gradient: tuple[int, ...] = ()
    tie_optimizer: tuple[int, ...] = ()


class MicrobatchCost(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One microbatch of ``rows`` rows on each data replica, by kind of block.

    pool, layout: indices. forward, backward: seconds; recomputation and the collectives of tensor
    and expert parallelism are in them. collective: the collectives' share, forward and backward
    together. activation: bytes kept for each microbatch in flight; workspace: bytes live only
    while the block runs.
    """

    pool: int
    layout: int
    rows: int
    recompute: Recompute = "none"
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    collective: tuple[float, ...]
    activation: tuple[int, ...]
    workspace: tuple[int, ...]


class ParallelOption(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run a stage: on data * tensor devices of a pool, layout.expert divides data.

    reduce: sum of gradients over the data replicas, a line in bytes of gradient on one rank
    (all-reduce; with ZeRO reduce-scatter). gather: ZeRO's gathering of weights, a line in bytes of
    weight on one rank: once a step with ZeRO 1 and 2, in each forward and each backward of a
    microbatch with 3. reduce_experts, gather_experts: the same for the experts' parameters.
    """

    pool: int
    layout: int
    data: int
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = "none"
    reduce: LinearCost = LinearCost()
    gather: LinearCost = LinearCost()
    reduce_experts: LinearCost = LinearCost()
    gather_experts: LinearCost = LinearCost()


class StageBoundary(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor made by block ``producer`` and used by ``consumers`` (later blocks, sorted).

    A stage that uses it without holding its producer receives it once for each microbatch
    (``row_bytes`` for each row of the replica's share, and ``fixed_bytes``), and where ``gradient``
    holds returns as much. saved: its stage keeps it for the backward in any case; otherwise a stage
    that sends it keeps it for each microbatch in flight. widened: how many times the bytes that
    are sent are kept (2 where float32 is sent as bfloat16).
    """

    producer: int
    consumers: tuple[int, ...]
    row_bytes: int
    fixed_bytes: int = 0
    gradient: bool = True
    saved: bool = True
    widened: int = 1


class JointTiedParameter(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter used by more than one block (sorted); its bytes are in each Layout.

    A stage that holds any of the blocks holds a copy; where not all are in one stage, each holder
    pays (m + 1) messages of its gradient a step over its pool's ``transfer``.
    """

    name: str
    blocks: tuple[int, ...]


class StagePin(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wish: blocks [first, last] all lie on stage ``stage`` (negative counts from the end)."""

    first: int
    last: int
    stage: int


class JointProblem(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    blocks: names; kinds: by block, its row in all tables of length K = max(kinds) + 1. batch: rows
    of a step; microbatches: counts to choose from, each giving rows = ceil(batch / (m * data)) on
    a replica, with a ``MicrobatchCost`` for each (pool, layout, rows, recompute) that an option can
    need: an option without one cannot be chosen with that count (nor where data * m exceeds the
    batch). no_cut_after: no stage may end after these blocks; cut_after: a stage must end after
    these. pins: wishes. virtual: stages per rank that "interleaved" may use. uniform: every stage
    has the same data, tensor and expert degree, ZeRO level and recompute. weights: the weight mode
    of "async". bubble and memory of the schedules: :mod:`fxpart.solver.joint.schedule_costs`.
    """

    format: Literal["fxpart-joint-problem"] = "fxpart-joint-problem"
    version: int = 1
    blocks: tuple[str, ...]
    kinds: tuple[int, ...]
    batch: int
    pools: tuple[Pool, ...]
    layouts: tuple[ParallelLayout, ...]
    works: tuple[MicrobatchCost, ...]
    options: tuple[ParallelOption, ...]
    boundaries: tuple[StageBoundary, ...] = ()
    ties: tuple[JointTiedParameter, ...] = ()
    microbatches: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = (DEFAULT_SCHEDULE,)
    weights: str = STASH
    virtual: tuple[int, ...] = (2,)
    min_stages: int = 1
    max_stages: int = 1
    no_cut_after: tuple[int, ...] = ()
    cut_after: tuple[int, ...] = ()
    pins: tuple[StagePin, ...] = ()
    uniform: bool = False


class JointChoice(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate: microbatch count, schedule, the first block of each piece, options by stage.

    starts[0] = 0. With virtual = v > 1 (interleaved only) there are v pieces for each of the S
    stages, len(starts) = S * v, and piece k lies on stage k mod S; otherwise a piece is a stage.
    """

    microbatches: int
    schedule: str
    starts: tuple[int, ...]
    options: tuple[int, ...]
    virtual: int = 1


class JointSolution(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A solver's answer. bound <= optimum <= objective; choice None: infeasible or unknown.

    candidates: the choice first, then the best others found, by rising objective, that differ in
    number of stages, microbatches, schedule or some stage's degrees (not merely in cuts).
    """

    status: Status
    choice: JointChoice | None
    objective: float
    bound: float
    solver: str
    candidates: tuple[JointChoice, ...] = ()


def count_option_devices(problem: JointProblem, option: ParallelOption) -> int:
    """Devices that a stage with this option takes."""
    return option.data * problem.layouts[option.layout].tensor


def count_microbatch_rows(batch: int, microbatches: int, data: int) -> int:
    """Rows of a microbatch on each data replica; 0 where there are not enough for each."""
    return -(-batch // (microbatches * data)) if microbatches * data <= batch else 0
