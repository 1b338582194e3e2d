"""The joint problem as numbers, archived as JSON: all decisions of a plan at once.

Blocks 0..n-1 are in a fixed topological order. Blocks of equal cost are of one *kind*, and all
tables are by kind, so that 96 equal layers cost one. A choice cuts the blocks into contiguous
stages and gives each stage an *option*: a number of devices of a pool, and how they share its work.
All units are seconds and bytes.

A :class:`~fxpart.solver.problem.PartitionProblem` has fixed degrees and prices the graph of one
rank exactly. This problem prices each kind of block separately for each tensor and expert degree,
with the batch divided over the data replicas. It is used to choose those degrees.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from fxpart.plan.offload import Offload
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.schedule.weight_modes import STASH
from fxpart.solver.problem import BlockValue, Recompute
from fxpart.solver.solution import SolverResult


class _JointStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class LinearCost(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Linear cost in bytes: ``latency + inverse * bytes`` seconds, and 0 for 0 bytes."""

    latency: float = 0.0
    inverse: float = 0.0

    def __call__(self, size: float) -> float:
        """Return the seconds for ``size`` bytes."""
        return self.latency + self.inverse * size if size > 0 else 0.0


class Pool(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of one type: their number, usable bytes on each, and devices per host.

    transfer: of a value into a stage on this pool from another stage, over the worst possible link
    (0 if the cluster is one device).
    """

    name: str
    devices: int
    memory: int
    host: int = 1
    transfer: LinearCost = LinearCost()


class ParameterFootprint(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of parameters on one rank, by kind of block, before ZeRO, and optimizer seconds.

    step: optimizer seconds, [pool][kind]. unsent: bytes of gradients that gradient reduction does
    not move, at most ``gradient``: for rows of embedding tables, the difference between an
    all-reduce and an all-gather. Empty: none.
    """

    weight: tuple[int, ...]
    gradient: tuple[int, ...]
    optimizer: tuple[int, ...]
    step: tuple[tuple[float, ...], ...]
    unsent: tuple[int, ...] = ()


class ParallelLayout(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ``tensor`` ranks share each block, and ``expert`` data replicas its experts.

    context: the ranks of ``tensor`` that have parts of the sequences: 1 for none, or all. offload:
    what is in host memory, whose bytes are in no table.

    dense: parameters that every data replica has in full (gradients are reduced over all of them).
    experts: parameters of which each of ``expert`` replicas has a part (reduced over data / expert
    replicas), None if expert is 1 (then they are in ``dense``). buffer: bytes by kind. tie_weight,
    tie_gradient, tie_optimizer: bytes on one rank, by tie of the problem. Tied parameters are in no
    other table, except that their optimizer seconds are in the ``step`` of the kind of their first
    block.
    """

    tensor: int
    expert: int = 1
    context: int = 1
    offload: Offload = "none"
    dense: ParameterFootprint
    experts: ParameterFootprint | None = None
    buffer: tuple[int, ...]
    tie_weight: tuple[int, ...] = ()
    tie_gradient: tuple[int, ...] = ()
    tie_optimizer: tuple[int, ...] = ()


class MicrobatchCost(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One microbatch of ``rows`` rows on each data replica, by kind of block.

    pool, layout: indices. forward, backward: seconds, including recomputation and the collectives
    of tensor and expert parallelism. collective: the collectives' share, forward and backward
    together. activation: bytes stored per microbatch in flight; workspace: bytes live only while
    the block runs; largest: bytes of the largest tensor that autograd saves.
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
    largest: int = 0


class ParallelOption(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run a stage: on data * tensor devices of a pool; layout.expert divides data.

    reduce: gradient reduction over the data replicas, linear in bytes of gradient on one rank
    (all-reduce; with ZeRO reduce-scatter). gather: ZeRO's all-gather of weights, linear in bytes of
    weight on one rank: per step with ZeRO 1 and 2, in each forward and each backward of a
    microbatch with 3. reduce_experts, gather_experts: the same for the experts' parameters.
    shard_degree: under hybrid sharding the number of replicas that share one set of ZeRO's shards,
    a divisor of data; ``gather`` is over these, and ``reduce`` includes the all-reduce of a shard
    over the others. 0: all replicas share one. With distributed experts it is 0.
    """

    pool: int
    layout: int
    data: int
    zero: Literal[0, 1, 2, 3] = 0
    shard_degree: int = 0
    recompute: Recompute = "none"
    reduce: LinearCost = LinearCost()
    gather: LinearCost = LinearCost()
    reduce_experts: LinearCost = LinearCost()
    gather_experts: LinearCost = LinearCost()

    def shards(self, layout: ParallelLayout) -> tuple[int, int]:
        """Return the replicas that share ZeRO's shards of dense parameters, and of experts."""
        return self.shard_degree or self.data, self.data // layout.expert


class StageBoundary(BlockValue, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value with ``row_bytes`` for each row of a replica's share, plus ``fixed_bytes``."""

    row_bytes: int
    fixed_bytes: int = 0
    gradient: bool = True


class JointTiedParameter(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter or buffer used by more than one block (sorted); its bytes are in each Layout.

    A stage with any of the blocks has a copy. If they are not all in one stage, each such stage
    pays (m + 1) messages of its gradient per step over its pool's ``transfer``. buffer: it is no
    parameter and has no gradient.
    """

    name: str
    blocks: tuple[int, ...]
    buffer: bool = False


class StagePin(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraint: blocks [first, last] are all on stage ``stage`` (negative: from the end)."""

    first: int
    last: int
    stage: int


class JointProblem(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole problem.

    blocks: names; kinds: by block, its row in all tables of length K = max(kinds) + 1. batch: rows
    of a step. microbatches: candidate counts, each with rows = ceil(batch / (m * data)) on a
    replica. There is a ``MicrobatchCost`` for each (pool, layout, rows, recompute) that an option
    can need; an option without one cannot be chosen with that count (nor if data * m exceeds the
    batch). no_cut_after: no stage may end after these blocks; cut_after: a stage must end after
    these. pins: constraints. virtual: stages per rank that "interleaved" may use. uniform: every
    stage has the same data, tensor and expert degree, ZeRO level, shard degree and offload.
    stage_tensor: the tensor degree of each stage, if given; all options then have one data degree.
    weights: the weight mode of "async". worst: all devices and links were priced as the slowest.
    offloads: that remedies may name. Bubble and memory of the schedules:
    :mod:`fxpart.solver.schedule_costs`.
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
    stage_tensor: tuple[int, ...] = ()
    worst: bool = False
    offloads: tuple[Offload, ...] = ()


class JointChoice(_JointStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate: microbatch count, schedule, the first block of each piece, options by stage.

    starts[0] = 0. With virtual = v > 1 (interleaved only) there are v pieces for each of the S
    stages, len(starts) = S * v, and piece k is on stage k mod S; otherwise a piece is a stage.
    """

    microbatches: int
    schedule: str
    starts: tuple[int, ...]
    options: tuple[int, ...]
    virtual: int = 1


JointSolution: TypeAlias = SolverResult[JointChoice]


def count_option_devices(problem: JointProblem, option: ParallelOption) -> int:
    """Return the devices of a stage with this option."""
    return option.data * problem.layouts[option.layout].tensor


def count_microbatch_rows(batch: int, microbatches: int, data: int) -> int:
    """Return the rows of a microbatch on each data replica; 0 if there are too few for each."""
    return -(-batch // (microbatches * data)) if microbatches * data <= batch else 0
