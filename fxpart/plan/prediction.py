"""The predictions of a plan: memory and time of ranks, and the parts of the step time."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Literal

import msgspec

from fxpart.cluster.devices import CpuLoadImbalance

IDLE = "idle"  # the label of the seconds in which the bottleneck stage waits
_ROUNDING = 1e-12  # of a step: smaller remainders are rounding


class _PredictionStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class PeakMemory(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak memory of a rank in bytes, by cause.

    copies: copies of weights besides the parameters, as the weight mode of an asynchronous schedule
    stores them: versions for pending backwards, predicted weights, running means of updates. sums:
    packed gradients while they are reduced over the ranks of a stage, besides ``gradients``.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    transfers: int
    copies: int = 0
    sums: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts, in bytes."""
        return (
            self.weights + self.gradients + self.optimizer
            + self.activations + self.buffers + self.transfers + self.copies + self.sums
        )  # fmt: skip


class LiveTensor(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the largest tensors at a rank's predicted peak.

    name: of the parameter, or of the node in the graph. why: "weight", "buffer", "optimizer state",
    "gradient", "saved for NODE, 2 microbatches", "result", "working memory, backward".
    """

    name: str
    bytes: int
    why: str


class RankPrediction(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted needs of the ranks of one stage; equal ranks share an entry.

    Seconds per microbatch: forward and backward (with recomputation and collectives within a stage,
    whose part is collective), transfer (between stages), gather (of ZeRO-3's weights). Seconds per
    step: sync (gradient reduction over replicas, and ZeRO's other collectives), tie (messages of
    tied parameters), optimizer, overhead (of the runtime, where measured), predict (weight
    prediction, in an asynchronous schedule). Bytes at the peak; workspace: those of
    ``memory.activations`` that live only while a block runs. in_flight: microbatches whose
    activations are stored at once. peak: the largest total of the rank's tensors, found by
    simulating a step op by op, 0 if not simulated; usually below ``memory.total``, which has the
    maximum of every part, but not the gradients that wait across blocks. top: the ten largest
    tensors at that moment. pieces: the (forward, backward) seconds of each virtual stage, where
    known; their sums are those of the stage. microbatches: how many of a step's microbatches the
    ranks compute, where other replicas of the stage compute the others; 0: all. staleness: the most
    updates that the stage applies between a forward and its backward; 0 where the pipeline is
    flushed before each update. update: bytes of tensors during the optimizer step, including its
    temporaries; 0 if not known. process: bytes of the rank's process besides its tensors
    (interpreter, libraries), and allocator: bytes that the allocator reserves beyond its tensors,
    as measured on the rank's host, plus half the variation of equal runs; 0 where not measured, and
    on devices other than CPUs. The memory limit leaves space for both. host: bytes that are
    offloaded to the host's memory, on a CPU also parts of ``memory``; 0 if not known.
    """

    ranks: tuple[int, ...]
    stage: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    sync_seconds: float
    optimizer_seconds: float
    overhead_seconds: float = 0.0
    collective_seconds: float = 0.0
    gather_seconds: float = 0.0
    tie_seconds: float = 0.0
    predict_seconds: float = 0.0
    memory: PeakMemory
    memory_limit: int
    in_flight: int
    workspace: int = 0
    peak: int = 0
    top: tuple[LiveTensor, ...] = ()
    pieces: tuple[tuple[float, float], ...] = ()
    microbatches: int = 0
    staleness: int = 0
    update: int = 0
    process: int = 0
    allocator: int = 0
    host: int = 0

    @property
    def resident(self) -> int:
        """Return the bytes of the rank's process at its peak, with ``tensors``; 0 if not known."""
        return self.process + self.tensors + self.allocator if self.process else 0

    @property
    def tensors(self) -> int:
        """Return the peak bytes of tensors, in the step's passes or in the update after them."""
        return max(self.memory.total, self.update)

    def taken(self, microbatches: int) -> int:
        """Return how many of a step's microbatches the ranks compute."""
        return self.microbatches or microbatches

    @property
    def busy_seconds(self) -> float:
        """Return the seconds of a microbatch without transfers between stages."""
        return fsum((self.forward_seconds, self.backward_seconds, self.gather_seconds))

    @property
    def microbatch_seconds(self) -> float:
        """Return t: seconds per microbatch."""
        return fsum((self.busy_seconds, self.transfer_seconds))

    @property
    def step_only_seconds(self) -> float:
        """Return beta: seconds per step that do not depend on the number of microbatches."""
        return fsum(
            (self.sync_seconds, self.tie_seconds, self.optimizer_seconds, self.overhead_seconds,
             self.predict_seconds)
        )  # fmt: skip


class HostLoad(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks that share a host, and the contention between them.

    slowdown: factors on computation time while 1, 2, ... ranks of the host compute. full: number of
    computing ranks that the seconds of :class:`RankPrediction` assume, which may be more than the
    plan has there; 0: all of ``ranks``. transfer: number of computing ranks that a transfer of the
    host counts as. wake: delay in seconds of a transfer to one of the ranks while 1, 2, ... of them
    compute, including its receiver. uneven: imbalance of the host's cores if it has more ranks than
    cores; None where there is none, or where it is not known. shares: by rank, the fraction of time
    that its CPU quota lets it compute, if quotas limit the host's ranks; ``full`` is then the sum
    of all shares, including ranks that are not the plan's.
    """

    ranks: tuple[int, ...]
    slowdown: tuple[float, ...]
    transfer: float = 0.0
    full: float = 0
    wake: tuple[float, ...] = ()
    uneven: CpuLoadImbalance | None = None
    shares: tuple[float, ...] = ()


class Prediction(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time in seconds: the closed form that was minimized, and the simulated schedule.

    method: how simulated_seconds was found; "closed form" where the schedule has no simulation or
    too many actions for one. bubble: the fraction of that step in which the ranks idle or wait for
    transfers, 0 to 1. ranks: one entry for equal ranks of a stage. hosts: with contention that the
    simulation includes; on others all ranks are assumed to compute all the time. rehearsed_seconds:
    the measured step time of this plan's trial run in the profile; 0 without one.
    corrected_seconds: with trial runs of other plans only, simulated_seconds times the correction
    by runs of similar plans; else 0. flushed_seconds: for an asynchronous plan, the step time of
    the same stages with a flush before each update (1F1B, simulated); its other seconds are those
    of a minibatch in steady state.
    """

    step_seconds: float
    simulated_seconds: float
    bubble: float
    ranks: tuple[RankPrediction, ...]
    hosts: tuple[HostLoad, ...] = ()
    method: Literal["simulation", "closed form"] = "simulation"
    rehearsed_seconds: float = 0.0
    corrected_seconds: float = 0.0
    flushed_seconds: float = 0.0

    @property
    def expected_seconds(self) -> float:
        """Return the step time: predicted seconds per optimizer step, the value that reports show.

        That of a trial run of this plan, else simulated and corrected by trial runs of other plans,
        else simulated. In an asynchronous pipeline, the seconds from one update to the next.
        """
        return self.rehearsed_seconds or self.corrected_seconds or self.simulated_seconds


class StepParts(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one step on the bottleneck stage by cause; their sum is the step time.

    The bottleneck is the stage with the largest (m - fill) t + beta. overhead: of the runtime, per
    step. bubble: the remainder (at least 0), in which the stage waits while the pipeline fills and
    flushes.
    """

    stage: int
    compute: float
    collectives: float
    transfers: float
    gathers: float
    sums: float
    ties: float
    optimizer: float
    overhead: float
    bubble: float
    predictions: float = 0.0

    def named(self) -> dict[str, float]:
        """Return the parts by their labels in reports, in order."""
        return {
            "computation": self.compute,
            "collectives within stages": self.collectives,
            "transfers between stages": self.transfers,
            "weight all-gather (ZeRO 3)": self.gathers,
            "gradient reduction": self.sums,
            "tied-parameter gradient reduction": self.ties,
            "optimizer step": self.optimizer,
            "runtime overhead": self.overhead,
            "weight prediction": self.predictions,
            IDLE: self.bubble,
        }


def pace(entry: RankPrediction, microbatches: int, fill: float) -> float:
    """Return (m - fill) t + beta: the time by which a stage bounds the step."""
    count = entry.taken(microbatches) - fill
    return count * entry.microbatch_seconds + entry.step_only_seconds


def bottleneck(ranks: Sequence[RankPrediction], microbatches: int, fill: float) -> RankPrediction:
    """Return the prediction of the bottleneck stage; of equal ones the first."""
    return max(ranks, key=lambda entry: pace(entry, microbatches, fill))


def step_parts(
    ranks: Sequence[RankPrediction], microbatches: int, fill: float, step: float
) -> StepParts:
    """Return the parts of a step of ``step`` seconds. fill: as of ``get_fill_fraction``."""
    entry = bottleneck(ranks, microbatches, fill)
    once = (
        entry.sync_seconds, entry.tie_seconds, entry.optimizer_seconds, entry.overhead_seconds,
        entry.predict_seconds,
    )  # fmt: skip
    count = entry.taken(microbatches)
    moves = [
        count * part
        for part in (entry.collective_seconds, entry.transfer_seconds, entry.gather_seconds)
    ]
    work = fsum((entry.forward_seconds, entry.backward_seconds, -entry.collective_seconds))
    compute = count * work
    bubble = fsum((step, -compute, *(-part for part in (*moves, *once))))
    return StepParts(
        stage=entry.stage,
        compute=compute,
        collectives=moves[0],
        transfers=moves[1],
        gathers=moves[2],
        sums=once[0],
        ties=once[1],
        optimizer=once[2],
        overhead=once[3],
        predictions=once[4],
        bubble=bubble if bubble > _ROUNDING * step else 0.0,
    )


def busy_by_rank(ranks: Sequence[RankPrediction], microbatches: int) -> dict[int, float]:
    """Return the seconds that each rank computes in a step, including collectives in its stage."""
    return {
        rank: entry.taken(microbatches) * entry.busy_seconds
        for entry in ranks
        for rank in entry.ranks
    }


def idle_share(ranks: Sequence[RankPrediction], microbatches: int, step: float) -> float:
    """Return the fraction of all ranks' time per step without computation and reduction, 0 to 1."""
    busy = fsum(
        len(e.ranks) * (e.taken(microbatches) * e.busy_seconds + e.step_only_seconds) for e in ranks
    )
    whole = step * sum(len(e.ranks) for e in ranks)
    return min(1.0, max(0.0, 1.0 - busy / whole)) if whole > 0 else 0.0
