"""Cost of every run of blocks as a stage: arrays [first, last], one option at a time.

A second implementation of :meth:`JointScorer.stage` with prefix sums: bytes are equal, seconds are
equal up to rounding. Entries with last < first are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from fxpart.solver.joint.objective import JointScorer
from fxpart.solver.joint.problem import (
    JointProblem,
    LinearCost,
    MicrobatchCost,
    ParallelLayout,
    ParallelOption,
    ParameterFootprint,
)
from fxpart.solver.joint.stage_state import Part
from fxpart.solver.joint.weight_copies import WeightCopyCounts
from fxpart.solver.objective import count_tied_reduction_messages
from fxpart.solver.schedule_costs import count_stage_in_flight, is_stream

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_CUT_FROM: tuple[tuple[Part, int], ...] = (("weight", 3), ("gradient", 2), ("optimizer", 1))


@dataclass(frozen=True)
class IntervalSizes:
    """Bytes of one option at one microbatch count, [first, last].

    standing: with one copy of the weights and nothing in flight; each: per microbatch in flight;
    weights: of one copy. copied: additional copies of an asynchronous pipeline.
    """

    standing: Bytes
    each: Bytes
    weights: Bytes
    copied: WeightCopyCounts

    def memory(self, schedule: str, microbatches: int, to_end: int, stages: int) -> Bytes:
        """Return bytes as one of ``stages`` stages, with ``to_end`` to the end, itself included."""
        flying = count_stage_in_flight(schedule, microbatches, stages, stages - to_end)
        extra = self.copied.extra(microbatches, to_end) if is_stream(schedule) else 0
        return self.standing + flying * self.each + extra * self.weights

    def total(
        self,
        at: tuple[int, int],
        schedule: str,
        microbatches: int,
        to_end: int,
        stages: int,
    ) -> int:
        """Return the entry of :meth:`memory` for one interval."""
        flying = count_stage_in_flight(schedule, microbatches, stages, stages - to_end)
        extra = self.copied.extra(microbatches, to_end) if is_stream(schedule) else 0
        return int(self.standing[at] + flying * self.each[at] + extra * self.weights[at])


@dataclass(frozen=True)
class IntervalCosts:
    """One option at one microbatch count, [first, last].

    seconds: t, per microbatch; forward: the part of the forward pass and the received values; once:
    beta, per step.
    """

    seconds: Floats
    forward: Floats
    once: Floats
    sizes: IntervalSizes

    def load(self, microbatches: int, share: float) -> Floats:
        """Return (m - fill) t + beta: the addition to the step time as the bottleneck stage."""
        return (microbatches - share) * self.seconds + self.once


@dataclass(frozen=True)
class _IntervalParameters:
    """Parameters of each interval under one option, without recompute: bytes, and seconds."""

    weight: Bytes
    standing: Bytes  # weights, gradients, optimizer state and buffers
    gathers: Floats
    once: Floats  # without ties


class IntervalTables:
    """Costs of intervals of one problem; caches the common parts of options."""

    def __init__(self, problem: JointProblem) -> None:
        """Find the values and ties that each interval receives, sends and contains."""
        self.problem, self.scorer = problem, JointScorer(problem)
        n = len(problem.blocks)
        self.kinds = np.array(problem.kinds)
        self.allowed = _allowed(problem)
        first, last = np.arange(n)[:, None], np.arange(n)[None, :]
        self.holds, self.apart = list[Mask](), list[Mask]()
        for tie in problem.ties:
            any_block = np.zeros((n, n), bool)
            for block in tie.blocks:
                any_block |= (first <= block) & (block <= last)
            whole = (first <= tie.blocks[0]) & (tie.blocks[-1] <= last)
            self.holds.append(any_block)
            self.apart.append(any_block & ~whole)
        self.received, self.sent = list[Mask](), list[Mask | None]()
        for value in problem.boundaries:
            uses = np.zeros((n, n), bool)
            for block in value.consumers:
                uses |= (first <= block) & (block <= last)
            self.received.append(uses & (first > value.producer))
            inside = (first <= value.producer) & (value.producer <= last)
            self.sent.append(None if value.saved else inside & (last < value.consumers[-1]))
        self._moved: dict[int, tuple[Bytes, Bytes, Bytes, Bytes]] = {}
        self._held: dict[ParallelOption, _IntervalParameters] = {}

    def costs(self, index: int, microbatches: int) -> IntervalCosts | None:
        """Return the tables of option ``index``; None if it cannot run so many microbatches."""
        option = self.problem.options[index]
        work = self.scorer.work(option, microbatches)
        if work is None:
            return None
        problem, layout = self.problem, self.problem.layouts[option.layout]
        line = problem.pools[option.pool].transfer
        count, size, back, _ = self._values(work.rows)
        held = self._state(option)
        arrive = line.latency * count[0] + line.inverse * size
        leave = line.latency * count[1] + line.inverse * back
        gathered = held.gathers if option.zero == 3 else 0.0
        forward = self._sums(work.forward) + arrive + gathered
        once = held.once
        for tie, apart in enumerate(self.apart):
            once = once + apart * (
                count_tied_reduction_messages(microbatches) * line(layout.tie_gradient[tie])
            )  # once is shared: never add in place
        return IntervalCosts(
            seconds=forward + self._sums(work.backward) + leave + gathered,
            forward=forward,
            once=once,
            sizes=self._sizes(option, work),
        )

    def sizes(self, index: int, microbatches: int) -> IntervalSizes | None:
        """Return only the bytes of :meth:`costs`, which are faster to compute."""
        option = self.problem.options[index]
        work = self.scorer.work(option, microbatches)
        return None if work is None else self._sizes(option, work)

    def _sizes(self, option: ParallelOption, work: MicrobatchCost) -> IntervalSizes:
        layout, held = self.problem.layouts[option.layout], self._state(option)
        return IntervalSizes(
            standing=held.standing + self._workspace(option, layout, work),
            each=self._bytes(work.activation) + self._values(work.rows)[3],
            weights=held.weight,
            copied=self.scorer.copied,
        )

    def _sums(self, by_kind: Sequence[float]) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.array(by_kind)[self.kinds])])
        return np.asarray(total[None, 1:] - total[:-1, None])

    def _bytes(self, by_kind: Sequence[int]) -> Bytes:
        row = np.array(by_kind, np.int64)[self.kinds]
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(row)])
        return np.asarray(total[None, 1:] - total[:-1, None])

    def _most(self, by_kind: Sequence[int]) -> Bytes:
        """Return the maximum over each interval's blocks."""
        row = np.array(by_kind, np.int64)[self.kinds]
        wide = np.where(self._upper(), row[None, :], 0)
        return np.asarray(np.maximum.accumulate(wide, axis=1))

    def _upper(self) -> Mask:
        return np.triu(np.ones((len(self.kinds), len(self.kinds)), bool))

    def _values(self, rows: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
        """Return messages in and back [2], bytes in, bytes back, bytes stored for one in flight."""
        if rows not in self._moved:
            n = len(self.kinds)
            count = np.zeros((2, n, n), np.int64)
            size, back, kept = (np.zeros((n, n), np.int64) for _ in range(3))
            for value, got, sent in zip(
                self.problem.boundaries, self.received, self.sent, strict=True
            ):
                each = value.row_bytes * rows + value.fixed_bytes
                if each:
                    if value.sent:
                        count[0] += got
                        size += each * got
                    kept += each * value.widened * got
                    if value.trips > 1:
                        count[1] += got
                        back += each * got
                    if sent is not None:
                        kept += each * value.widened * sent
            self._moved[rows] = count, size, back, kept
        return self._moved[rows]

    def _state(self, option: ParallelOption) -> _IntervalParameters:
        """Return the costs that do not depend on microbatches or recompute."""
        key = msgspec.structs.replace(option, recompute="none")
        if key not in self._held:
            self._held[key] = self._parameters(key)
        return self._held[key]

    def _parameters(self, option: ParallelOption) -> _IntervalParameters:
        layout = self.problem.layouts[option.layout]
        shares = option.shards(layout)
        whole = {part: self._whole(layout, part) for part, _ in _CUT_FROM}
        kept = {
            part: -(-whole[part][0] // shares[0]) + -(-whole[part][1] // shares[1])
            if option.zero >= level
            else whole[part][0] + whole[part][1]
            for part, level in _CUT_FROM
        }
        gathers, once = np.zeros(self.allowed.shape), np.zeros(self.allowed.shape)
        for k, (gather, reduce) in enumerate(
            ((option.gather, option.reduce), (option.gather_experts, option.reduce_experts))
        ):
            state = (layout.dense, layout.experts)[k]
            left = self._bytes(state.unsent) if state is not None and state.unsent else 0
            once = once + _line(reduce, whole["gradient"][k] - left)
            needed = (whole["gradient"][k] > 0) | (option.zero == 3)
            gathers = gathers + needed * _line(gather, whole["weight"][k])
        if option.zero in (1, 2):
            once = once + gathers
        for state, share in zip((layout.dense, layout.experts), shares, strict=True):
            if state is not None:
                once = once + self._sums(state.step[option.pool]) / (share if option.zero else 1)
        standing = kept["weight"] + kept["gradient"] + kept["optimizer"]
        standing = standing + self._bytes(layout.buffer)
        return _IntervalParameters(
            weight=kept["weight"], standing=standing, gathers=gathers, once=once
        )

    def _whole(self, layout: ParallelLayout, part: Part) -> tuple[Bytes, Bytes]:
        """Return bytes before ZeRO: dense ones with ties, and experts'."""

        def of(state: ParameterFootprint | None) -> Bytes:
            empty = np.zeros(self.allowed.shape, np.int64)
            return empty if state is None else self._bytes(getattr(state, part))

        tied = getattr(layout, f"tie_{part}")
        dense = of(layout.dense)
        for size, held in zip(tied, self.holds, strict=True):
            dense = dense + size * held
        return dense, of(layout.experts)

    def _workspace(
        self, option: ParallelOption, layout: ParallelLayout, work: MicrobatchCost
    ) -> Bytes:
        most = self._most(work.workspace)
        if option.zero < 3:
            return most
        experts = layout.experts.weight if layout.experts else (0,) * len(layout.dense.weight)
        gathered = [a + b for a, b in zip(layout.dense.weight, experts, strict=True)]
        return most + self._most(gathered)


def _line(line: LinearCost, size: Bytes) -> Floats:
    return np.where(size > 0, line.latency + line.inverse * size, 0.0)


def _allowed(problem: JointProblem) -> Mask:
    """Return intervals that the cut constraints permit as a stage."""
    n = len(problem.blocks)
    allowed = np.triu(np.ones((n, n), bool))
    for block in problem.no_cut_after:
        if block < n - 1:
            allowed[:, block] = False
            allowed[block + 1, :] = False
    for block in problem.cut_after:
        allowed[: block + 1, block + 1 :] = False
    return allowed
