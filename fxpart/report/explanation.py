"""The explanation of a plan as data: seconds, bytes, and shares of 1."""

from __future__ import annotations

import msgspec

from fxpart.plan.model import Certificate, PeakMemory
from fxpart.plan.offload import Offload
from fxpart.plan.prediction import StepParts
from fxpart.plan.staleness_penalty import ModeCandidate
from fxpart.plan.throughput import Throughput


class _ExplanationStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen and keyword-only."""


class StepFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """The step time, where it comes from, and what the closed form consists of.

    step_time: predicted seconds of one optimizer step. source: text that describes its origin.
    simulated_seconds: the simulated schedule. trial_run_seconds: measured, 0 without a trial run of
    this plan. corrected_seconds: the simulation corrected by trial runs of other plans, 0 without
    any. closed_form_seconds: the closed form that the search minimizes; parts and shares are of it,
    as the bottleneck stage spends them. bubble: the share of all ranks' time without computation.
    """

    step_time: float
    source: str
    simulated_seconds: float
    method: str
    trial_run_seconds: float
    corrected_seconds: float
    closed_form_seconds: float
    throughput: Throughput
    bubble: float
    parts: StepParts
    shares: dict[str, float]


class StepBottleneck(_ExplanationStruct, frozen=True, kw_only=True):
    """The bottleneck: the stage with the largest bound_seconds, a lower bound of the closed form.

    bound_seconds: (m - fill) * microbatch_seconds + step_only_seconds. balance: the largest
    microbatch time of a stage over the mean. largest: the part that takes most of the stage's time,
    and its share. as_slow: how many other stages are within 0.1 %. second: the slowest of the other
    stages, None where there is none.
    """

    stage: int
    blocks: str
    ranks: str
    microbatch_seconds: float
    step_only_seconds: float
    bound_seconds: float
    balance: float
    largest: str
    largest_share: float
    as_slow: int
    second: int | None
    second_bound_seconds: float | None


class MemoryBottleneck(_ExplanationStruct, frozen=True, kw_only=True):
    """The ranks with the least of their memory left, in shares of the limit. Bytes.

    process, allocator: what the process takes beside its tensors; resident: with them, at its peak.
    0 where that was not measured. The limit has room for both. host: the most that a rank offloads
    to its host's memory; offload: what it is.
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
    host: int = 0
    offload: Offload = "none"


class RejectedAlternative(_ExplanationStruct, frozen=True, kw_only=True):
    """A rejected choice by its closed form, which is comparable with the plan's own.

    closed_form_seconds: None for a choice that does not fit. slower: its excess over the plan's
    closed form, as a share. unfit_seconds, unfit_slower: the same for a choice that does not fit,
    without its memory limit (negative: faster).
    """

    what: str
    stages: int
    microbatches: int
    schedule: str
    closed_form_seconds: float | None
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
    context_parallel: int
    zero: int
    shard_degree: int
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
    host: int = 0


class ContentionFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """CPU contention on a host that several ranks share.

    slowdown: how many times longer a computation takes while 1, 2, ... of these ranks compute.
    transfer: how many computing ranks a transfer counts as. assumed: the slowdown that the seconds
    of the plan's stages include.
    """

    ranks: str
    slowdown: tuple[float, ...]
    transfer: float
    assumed: float


class QueueFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """Queue routing compared with round-robin routing, simulated without CPU contention.

    staleness: by stage, replicas counted once. seconds: between two updates; missed: by stage the
    most updates that its gradients missed. others: the seconds by a staleness of all stages.
    round_robin_seconds: a step with round-robin routing.
    """

    staleness: tuple[int, ...]
    seconds: float
    missed: tuple[int, ...]
    others: dict[str, float]
    round_robin_seconds: float


class AsynchronousStageFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """The staleness of one stage of an asynchronous plan and its costs.

    copies: bytes of weight copies beside the parameters. predict_seconds: weight prediction per
    step.
    """

    stage: int
    in_flight: int
    staleness: int
    copies: int
    predict_seconds: float


class AsynchronyFigures(_ExplanationStruct, frozen=True, kw_only=True):
    """What an asynchronous pipeline gains over one that is flushed, both simulated.

    simulated_seconds: a step once the pipeline is full. flushed_seconds: a step of the same stages
    with a flush before each update; 0 where it was not simulated. speedup: flushed over
    asynchronous. speedup_bound: (m + S - 1) / m, the speedup of equal stages that only compute.
    """

    weights: str
    simulated_seconds: float
    flushed_seconds: float
    speedup: float | None
    speedup_bound: float
    by_stage: tuple[AsynchronousStageFigures, ...]


class Explanation(_ExplanationStruct, frozen=True, kw_only=True):
    """The output of ``fxpart explain plan.json --json``.

    devices: those of the cluster, used or not. binding: rejected choices that would be faster and
    do not fit. hosts: those with CPU contention; empty without any, or where the simulation assumes
    that all ranks compute all the time. modes: what the mode "auto" compared by time to a target
    loss; empty without a staleness penalty. asynchrony: None for a plan that is flushed before each
    update. queues: None without queue routing, or where the plan is too large to simulate it.
    certificate, degrees: as in the plan; their objectives are closed forms. not_runnable: why this
    version cannot train by the plan.
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
    modes: tuple[ModeCandidate, ...]
    asynchrony: AsynchronyFigures | None
    queues: QueueFigures | None
    certificate: Certificate
    degrees: Certificate | None
    not_runnable: tuple[str, ...]
