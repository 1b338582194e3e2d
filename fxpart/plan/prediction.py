"""What ranks are predicted to need, and what a step's time is made of. Part of a plan's file."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Literal

import msgspec

from fxpart.cluster.devices import CpuLoadImbalance

IDLE = "idle"  # the label of the seconds in which the bottleneck stage waits
_ROUNDING = 1e-12  # of a step: what is left of it that is no time


class _PredictionStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and strict about fields."""


class PeakMemory(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak memory of a rank in bytes, by cause.

    copies: of weights beside the parameters, which an asynchronous schedule's weight mode holds:
    versions that backwards still read, predicted weights, running means of updates. sums: gradients
    that are there twice while they are packed to be summed over the ranks of a stage.
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
        """All parts together, in bytes."""
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
    """What ranks of one stage are predicted to need, said once for all that are alike.

    Seconds per microbatch: forward and backward (with recomputation and collectives inside a
    stage, whose share is collective), transfer (between stages), gather (ZeRO 3's weights).
    Seconds per step: sync (gradient sums over replicas, and ZeRO's other gathering), tie (messages
    about shared parameters), optimizer, overhead (the runtime's own, where measured), predict
    (weights looked ahead, of an asynchronous schedule). Bytes at the
    peak; workspace: those of ``memory.activations`` that live only while a block runs. in_flight:
    microbatches whose activations are held at once. peak: bytes that the rank's tensors take at
    most at once, found by following a step op by op; at most ``memory.total``, which has every part
    at its largest; 0 where it was not followed. top: the ten largest tensors at that moment.
    pieces: of a stage of several pieces the (forward, backward) seconds of each, where they are
    known; together those of the stage. microbatches: how many of a step's microbatches the ranks
    do, where copies of the stage do the others; 0: all. staleness: the most updates that the stage
    applies between a forward and its backward; 0 where the pipeline drains before each update.
    update: bytes of tensors while the optimizer steps, its temporaries among them; 0 if not known.
    process: bytes of the rank's process beside its tensors (the interpreter, libraries), and
    allocator: those that the allocator holds and tensors do not, as measured on the rank's host,
    and half of what equal runs differ by; 0 where that was not, and on devices that are no CPU. The
    memory limit leaves room for both.
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

    @property
    def resident(self) -> int:
        """Bytes of the rank's process at its peak, with ``tensors``; 0 if not known."""
        return self.process + self.tensors + self.allocator if self.process else 0

    @property
    def tensors(self) -> int:
        """Bytes that tensors take at most, in the step's passes or in the update after them."""
        return max(self.memory.total, self.update)

    def taken(self, microbatches: int) -> int:
        """How many of a step's microbatches the ranks do."""
        return self.microbatches or microbatches

    @property
    def busy_seconds(self) -> float:
        """Seconds of a microbatch without transfers between stages."""
        return fsum((self.forward_seconds, self.backward_seconds, self.gather_seconds))

    @property
    def microbatch_seconds(self) -> float:
        """t: seconds of a microbatch."""
        return fsum((self.busy_seconds, self.transfer_seconds))

    @property
    def step_only_seconds(self) -> float:
        """beta: seconds once a step."""
        return fsum(
            (self.sync_seconds, self.tie_seconds, self.optimizer_seconds, self.overhead_seconds,
             self.predict_seconds)
        )  # fmt: skip


class HostLoad(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks that share a host, as far as it changes their pace.

    slowdown: how many times longer a computation takes while 1, 2, ... ranks of the host compute.
    full: for how many computing ranks the seconds of :class:`RankPrediction` are, which may be more
    than the plan has there; 0: for all of ``ranks``. transfer: how many computing ranks a transfer
    of the host counts as. wake: by how many seconds a transfer to one of the ranks ends later while
    1, 2, ... of them compute, its receiver included. uneven: how long its cores are not all
    used, where it has more ranks than cores; none where they always are, or where it is not known.
    shares: by rank, of the time in which it computes, what its quota leaves it, where quotas hold
    the host's ranks; ``full`` is then the sum of all shares, of ranks that the plan has not too.
    """

    ranks: tuple[int, ...]
    slowdown: tuple[float, ...]
    transfer: float = 0.0
    full: float = 0
    wake: tuple[float, ...] = ()
    uneven: CpuLoadImbalance | None = None
    shares: tuple[float, ...] = ()


class Prediction(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time in seconds: the closed form that was minimised, and the simulated schedule.

    method: how simulated_seconds was found; "closed form" where the schedule has no simulation or
    too many actions for one. bubble: the share of that step in which the ranks idle or wait for
    transfers, 0 to 1. ranks: one entry for ranks of a stage that are alike. hosts: that ranks
    share, as far as the simulation minds it; on others all ranks are taken to compute all the time.
    rehearsed_seconds: what a step of this very plan took when the profile rehearsed it; 0 where it
    did not. corrected_seconds: where it has run others, the simulated seconds times by what runs of
    plans that are alike were longer than their simulations; else 0. flushed_seconds: of an
    asynchronous plan, a step of the same stages if they drained before each update (1F1B,
    simulated); its other seconds are a minibatch's in the full stream.
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
        """Step time: the predicted seconds of one optimizer step, the one that reports show.

        Of a trial run of this plan, else simulated and corrected by trial runs of other plans, else
        simulated. In an asynchronous pipeline, the seconds from one update to the next.
        """
        return self.rehearsed_seconds or self.corrected_seconds or self.simulated_seconds


class StepParts(_PredictionStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one step as the bottleneck stage spends them; together the whole step.

    The bottleneck is the stage with the largest (m - fill) t + beta. overhead: the runtime's own,
    once a step. bubble: what is left (not below 0, whatever rounding says), in which it waits for
    the pipeline to fill and to drain.
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
        """The parts by their labels in reports, in order."""
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
    """(m - fill) t + beta: the seconds by which a stage bounds the step."""
    count = entry.taken(microbatches) - fill
    return count * entry.microbatch_seconds + entry.step_only_seconds


def bottleneck(ranks: Sequence[RankPrediction], microbatches: int, fill: float) -> RankPrediction:
    """The entry that sets the step's pace; of equal ones the first."""
    return max(ranks, key=lambda entry: pace(entry, microbatches, fill))


def step_parts(
    ranks: Sequence[RankPrediction], microbatches: int, fill: float, step: float
) -> StepParts:
    """What a step of ``step`` seconds is made of; fill: of the schedule, see ``schedules.fill``."""
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
    """The seconds that each rank computes in a step, collectives inside its stage included."""
    return {
        rank: entry.taken(microbatches) * entry.busy_seconds
        for entry in ranks
        for rank in entry.ranks
    }


def idle_share(ranks: Sequence[RankPrediction], microbatches: int, step: float) -> float:
    """The share of all ranks' time in a step in which they compute and sum nothing, 0 to 1."""
    busy = fsum(
        len(e.ranks) * (e.taken(microbatches) * e.busy_seconds + e.step_only_seconds) for e in ranks
    )
    whole = step * sum(len(e.ranks) for e in ranks)
    return min(1.0, max(0.0, 1.0 - busy / whole)) if whole > 0 else 0.0
