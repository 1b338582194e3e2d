"""What an explanation of a plan says, as data: seconds, bytes, and shares of 1."""

from __future__ import annotations

import msgspec

from fxpart.plan.model import Certificate, PeakMemory
from fxpart.plan.prediction import StepParts


class _ExplanationStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen and keyword-only."""


class StepFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """The step: its seconds, what they are made of (together all of them), and each part's share.

    rehearsed_seconds: what it took when the profile ran this very plan, 0 where it did not.
    corrected_seconds: simulated, as runs of other plans correct it; 0 where there were none.
    samples_per_second: by that, or else by what is predicted; None for a step without time, as each
    share then is 0.
    """

    seconds: float
    simulated_seconds: float
    method: str
    samples_per_second: float | None
    bubble: float
    parts: StepParts
    shares: dict[str, float]
    rehearsed_seconds: float = 0.0
    corrected_seconds: float = 0.0


class StepBottleneck(_ExplanationStruct, frozen=True, kw_only=True):
    """The stage that bounds the step by pace_seconds = (m - fill) * microbatch + once a step.

    of_mean: its microbatch over the mean of all stages. largest: what it spends most on, and the
    share of its own time. as_slow: how many other stages are within 0.1 %. second: the next of the
    rest, None where there is none.
    """

    stage: int
    blocks: str
    ranks: str
    microbatch_seconds: float
    step_only_seconds: float
    pace_seconds: float
    of_mean: float
    largest: str
    largest_share: float
    as_slow: int
    second: int | None
    second_pace_seconds: float | None


class MemoryBottleneck(_ExplanationStruct, frozen=True, kw_only=True):
    """The ranks with the least of their memory left, in shares of the limit. Bytes.

    process, allocator: what the process takes beside its tensors; resident: with them, at its peak.
    0 where that was not measured. The limit has room for both.
    """

    stage: int
    ranks: str
    total: int
    limit: int
    free: int
    used: float
    parts: PeakMemory
    workspace: int
    in_flight: int
    process: int = 0
    allocator: int = 0
    resident: int = 0


class RejectedAlternative(_ExplanationStruct, frozen=True, kw_only=True):
    """A rejected choice: slower says by which share of the step; None where it does not fit.

    unfit_slower: the same for one that does not fit, were there memory (negative: faster).
    """

    what: str
    stages: int
    microbatches: int
    schedule: str
    step_seconds: float | None
    slower: float | None
    unfit_seconds: float | None
    unfit_slower: float | None
    why: str


class StageFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """One stage, or its ranks that are alike: decisions, seconds and bytes."""

    stage: int
    blocks: str
    label: str
    ranks: str
    devices: str
    data_parallel: int
    tensor_parallel: int
    expert_parallel: int
    zero: int
    recompute: str
    parameters: int
    forward_seconds: float
    backward_seconds: float
    collective_seconds: float
    gather_seconds: float
    transfer_seconds: float
    sync_seconds: float
    tie_seconds: float
    optimizer_seconds: float
    overhead_seconds: float
    predict_seconds: float
    microbatch_seconds: float
    step_only_seconds: float
    memory: PeakMemory
    total: int
    limit: int
    free: int
    in_flight: int
    process: int = 0
    allocator: int = 0
    resident: int = 0


class ContentionFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """A host that ranks of the plan share.

    slowdown: how many times longer a computation takes while 1, 2, ... of these ranks compute.
    transfer: how many computing ranks a transfer counts as. assumed: the slowdown for which the
    seconds of the plan's stages are.
    """

    ranks: str
    slowdown: tuple[float, ...]
    transfer: float
    assumed: float


class QueueFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """What a plan of queues gains beside copies that take turns, each rank alone on its host.

    staleness: of each stage, its copies counted once. seconds: between two updates; missed: by
    stage the most updates that its gradients missed. others: the seconds by a staleness of all
    stages. turns_seconds: a step in turns.
    """

    staleness: tuple[int, ...]
    seconds: float
    missed: tuple[int, ...]
    others: dict[int, float]
    turns_seconds: float


class AsynchronousStageFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """One stage of an asynchronous plan: the updates that its forwards miss at most, and its costs.

    copies: bytes of weights beside the parameters. predict_seconds: a minibatch.
    """

    stage: int
    in_flight: int
    staleness: int
    copies: int
    predict_seconds: float


class AsynchronyFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """What an asynchronous plan gains, and what that costs.

    seconds: a minibatch of the full stream; flushed_seconds: a step of the same stages if they
    drained (both simulated; 0 where the latter was not found), faster: the latter over the former.
    at_most: (m + S - 1) / m, which equal stages gain where nothing else takes time.
    """

    weights: str
    seconds: float
    flushed_seconds: float
    faster: float | None
    at_most: float
    by_stage: tuple[AsynchronousStageFigures, ...]


class Explanation(_ExplanationStruct, frozen=True, kw_only=True):
    """Everything that ``fxpart explain plan.json --json`` says.

    devices: those of the cluster, used or not. binding: rejected choices that would be faster and
    do not fit. hosts: those whose ranks slow each other down; empty where none do, or where the
    simulation takes all ranks to compute all the time. asynchrony: None where the pipeline drains
    before each update. queues: None where there are none, or more than is simulated. certificate,
    degrees: as in the plan.
    not_runnable: why this version cannot train by the plan.
    """

    model: str
    cluster: str
    devices: int
    ranks: int
    stages: int
    schedule: str
    virtual: int
    microbatches: int
    batch_size: int
    step: StepFigures
    bottleneck: StepBottleneck
    fullest: MemoryBottleneck
    binding: tuple[RejectedAlternative, ...]
    next_best: RejectedAlternative | None
    rejected: tuple[RejectedAlternative, ...]
    changes: tuple[RejectedAlternative, ...]
    by_stage: tuple[StageFigures, ...]
    hosts: tuple[ContentionFigures, ...]
    asynchrony: AsynchronyFigures | None
    queues: QueueFigures | None
    certificate: Certificate
    degrees: Certificate | None
    not_runnable: tuple[str, ...]
