"""The objective: cost and memory of a choice. :func:`evaluate` judges every solver.

Per stage s and microbatch, t_s = forward f_s + backward b_s + transfers received; per step, beta_s
= tied-parameter gradient reduction + optimizer. The objective is

    T = fill sum_s t_s + max_s((m - fill) t_s + beta_s)

with the schedule's fill (:func:`.schedule_costs.get_fill_fraction`): 1 for GPipe and 1F1B.

Relation to the schedules, without beta_s and transfers: GPipe takes exactly sum_s t_s + (m-1)(max_s
f_s + max_s b_s), and 1F1B, in all simulations, no more. So T is exact for GPipe, and an upper bound
for 1F1B, if b_s = c f_s with one c for all stages (for equal stages it is exact for both). If
forward and backward peak on different stages, T is not a bound for either: it never exceeds GPipe's
time, and may be less than that and than 1F1B's (f = 0, 10, 1, 1 and b = 10, 0, 0, 1 with m = 3: T =
43, 1F1B takes 60, GPipe 63). Bounds that solvers prove are bounds on T; the time of a plan is that
of its simulated schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import fsum
from typing import TypeAlias

import msgspec

from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.evaluation import (
    ChoiceEvaluation,
    StageMemory,
    StagePeakMemory,
    check_choice,
    list_forbidden,
    list_overfull,
)
from fxpart.solver.problem import (
    PartitionChoice,
    PartitionProblem,
    Recomputation,
    Recompute,
    SplitBackward,
    Variant,
)
from fxpart.solver.schedule_costs import (
    count_stage_in_flight,
    get_fill_fraction,
    splits_backward,
    step_seconds,
)


class StageCost(StagePeakMemory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of a choice: blocks [first, last] on the device ``device`` (an index).

    forward, backward and transfer seconds are per microbatch, sync and optimizer seconds per step
    (sync: all messages of tied gradients in a step, without overlap with computation). collective:
    the communication between ranks of the stage within forward and backward. recompute: the mode of
    recomputation; recompute_seconds: its part of ``backward_seconds``. splitting_seconds: the part
    because backwards are split. host: bytes in host memory.
    """

    first: int
    last: int
    device: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float
    sync_seconds: float
    optimizer_seconds: float
    collective_seconds: float = 0.0
    recompute: Recompute = "none"
    recompute_seconds: float = 0.0
    splitting_seconds: float = 0.0
    host: int = 0

    @property
    def seconds(self) -> float:
        """Return t_s: seconds for one microbatch."""
        return self.forward_seconds + self.backward_seconds + self.transfer_seconds

    @property
    def step_only_seconds(self) -> float:
        """Return beta_s: seconds per step."""
        return self.sync_seconds + self.optimizer_seconds


PartitionEvaluation: TypeAlias = ChoiceEvaluation[StageCost]


def get_tied_reduction_link(problem: PartitionProblem, stage: int) -> tuple[float, float]:
    """Return latency and inverse bandwidth of the tied gradient reduction (see ``Weight``)."""
    if len(problem.devices) == 1:
        return 0.0, 0.0
    device = problem.devices[max(stage, 1)]
    return device.latency, device.inverse_bandwidth


def count_tied_reduction_messages(microbatches: int) -> int:
    """Return messages per step between a stage with a tied weight and its owner, of gradient size.

    The stage sends its gradient after the backward of each microbatch (only this preserves the
    summation order of single-process training) and receives the sum once.
    """
    return microbatches + 1


class PartitionScorer:
    """Evaluates many choices of one problem, with an index of values and weights by block."""

    def __init__(self, problem: PartitionProblem) -> None:
        """Index the problem's values by consumer and its weights by block."""
        self.problem = problem
        self._received: list[list[int]] = [[] for _ in problem.blocks]
        self._held: list[list[int]] = [[] for _ in problem.blocks]
        # values that are not saved anyway
        self._made: list[list[int]] = [[] for _ in problem.blocks]
        for index, value in enumerate(problem.values):
            for block in value.consumers:
                self._received[block].append(index)
            if not value.saved:
                self._made[value.producer].append(index)
        for index, weight in enumerate(problem.weights):
            for block in weight.blocks:
                self._held[block].append(index)

    def evaluate(self, choice: PartitionChoice) -> PartitionEvaluation:
        """Return the same as :func:`evaluate`."""
        problem, count = self.problem, len(choice.starts)
        _well_formed(problem, choice)
        variant = problem.variants[choice.variant]
        ends = (*(start - 1 for start in choice.starts[1:]), len(problem.blocks) - 1)
        m = variant.microbatches
        stages = tuple(
            self.stage(
                variant,
                k,
                first,
                last,
                count_stage_in_flight(choice.schedule, m, count, k),
                split=splits_backward(choice.schedule),
            )
            for k, (first, last) in enumerate(zip(choice.starts, ends, strict=True))
        )
        seconds = step_seconds(
            [s.seconds for s in stages],
            [s.step_only_seconds for s in stages],
            m,
            get_fill_fraction(choice.schedule, m, count),
        )
        names = [device.name for device in problem.devices]
        faults = (*_broken_constraints(problem, choice), *list_overfull(stages, names))
        return PartitionEvaluation(seconds=seconds, stages=stages, faults=faults)

    def stage(
        self, variant: Variant, k: int, first: int, last: int, flying: int, *, split: bool = False
    ) -> StageCost:
        """Return blocks [first, last] as stage ``k`` with ``flying`` microbatches in flight.

        In the fastest mode of recomputation that fits; if none does, in the smallest. split:
        whether its backwards are split.
        """
        plain = self._storing(variant, k, first, last, flying)
        plain = self._splitting(plain, variant) if split else plain
        halves = variant.split if split else None
        modes = self.problem.recompute
        if modes == ("none",) or (modes[0] == "none" and plain.fits):
            return plain
        found = [plain] if "none" in modes else []
        found += [
            self._recomputing(plain, variant, mode, halves)
            for mode in variant.recompute
            if mode.mode in modes
        ]
        fitting = [stage for stage in found if stage.fits]
        if fitting:
            return min(fitting, key=lambda stage: stage.seconds)
        return min(found or [plain], key=lambda stage: stage.needed)

    def _splitting(self, plain: StageCost, variant: Variant) -> StageCost:
        """Return a stage with split backwards, from the same stage with whole ones."""
        more, memory = self.problem.action, plain.memory
        if variant.split is not None:
            type_, blocks = (
                self.problem.devices[plain.device].type,
                range(plain.first, plain.last + 1),
            )
            more = fsum((more, *(variant.split.seconds[type_][b] for b in blocks)))
            kept = plain.in_flight * variant.split.count_more(variant.activation, blocks)
            memory = msgspec.structs.replace(memory, activations=memory.activations + kept)
        return msgspec.structs.replace(
            plain,
            backward_seconds=plain.backward_seconds + more,
            splitting_seconds=more,
            memory=memory,
        )

    def _recomputing(
        self, plain: StageCost, variant: Variant, mode: Recomputation, halves: SplitBackward | None
    ) -> StageCost:
        """Return a stage that recomputes, from the same stage that stores its activations.

        halves: costs of split backwards.
        """
        problem, first, last = self.problem, plain.first, plain.last
        blocks, flying = range(first, last + 1), plain.in_flight
        workspace = max(mode.workspace[b] for b in blocks)
        saved = sum(mode.activation[b] for b in blocks)
        saved += halves.count_more(mode.activation, blocks) if halves is not None else 0
        # values that are sent count as activations
        sent = flying * self._stored_bytes(variant, self._sent(first, last))
        memory = msgspec.structs.replace(
            plain.memory,
            activations=flying * (saved + self._duplicated_bytes(variant, first, last)) + workspace,
            transfers=plain.memory.transfers - sent,
        )
        type_ = problem.devices[plain.device].type
        again = fsum(mode.seconds[type_][first : last + 1])
        return msgspec.structs.replace(
            plain,
            backward_seconds=plain.backward_seconds + again,
            collective_seconds=plain.collective_seconds + fsum(mode.collective[first : last + 1]),
            memory=memory,
            workspace=workspace,
            recompute=mode.mode,
            recompute_seconds=again,
        )

    def _sent(self, first: int, last: int) -> list[int]:
        """Return the values that these blocks send and would not store otherwise."""
        values = self.problem.values
        return [
            v
            for b in range(first, last + 1)
            for v in self._made[b]
            if values[v].consumers[-1] > last
        ]

    def _list_received(self, first: int, last: int) -> list[int]:
        """Return the values of earlier blocks that these blocks use, sent or duplicated."""
        used = {v for b in range(first, last + 1) for v in self._received[b]}
        return sorted(v for v in used if self.problem.values[v].producer < first)

    def _duplicated_bytes(self, variant: Variant, first: int, last: int) -> int:
        """Return the bytes of one microbatch's values that the stage computes once more."""
        received = self._list_received(first, last)
        return sum(variant.value_bytes[v] for v in received if not self.problem.values[v].sent)

    def _stored_bytes(self, variant: Variant, values: Iterable[int]) -> int:
        return sum(variant.value_bytes[v] * self.problem.values[v].widened for v in values)

    def _storing(self, variant: Variant, k: int, first: int, last: int, flying: int) -> StageCost:
        """Return the stage without recomputation."""
        problem, device = self.problem, self.problem.devices[k]
        blocks = range(first, last + 1)
        received = self._list_received(first, last)
        weights = [problem.weights[w] for w in sorted({w for b in blocks for w in self._held[b]})]
        latency, inverse = get_tied_reduction_link(problem, k)
        workspace = max(variant.workspace[b] for b in blocks)
        saved = sum(variant.activation[b] for b in blocks)
        saved += self._duplicated_bytes(variant, first, last)
        moved = [v for v in received if problem.values[v].sent]
        state = sum(w.weight + w.gradient + w.optimizer for w in weights)
        return StageCost(
            first=first,
            last=last,
            device=k,
            forward_seconds=fsum((problem.action, *variant.forward[device.type][first : last + 1])),
            backward_seconds=fsum(
                (problem.action, *variant.backward[device.type][first : last + 1])
            ),
            transfer_seconds=fsum(
                problem.values[v].trips
                * (device.latency + variant.value_bytes[v] * device.inverse_bandwidth)
                for v in moved
            ),
            sync_seconds=fsum(
                count_tied_reduction_messages(variant.microbatches)
                * (latency + w.gradient * inverse)
                for w in weights
                if w.gradient and (w.blocks[0] < first or w.blocks[-1] > last)
            ),
            collective_seconds=fsum(variant.collective[first : last + 1]),
            optimizer_seconds=fsum((problem.once, *problem.step[device.type][first : last + 1])),
            memory=StageMemory(
                weights=sum(w.weight for w in weights if not w.buffer),
                gradients=sum(w.gradient for w in weights),
                optimizer=sum(w.optimizer for w in weights),
                activations=flying * saved + workspace,
                buffers=sum(w.weight for w in weights if w.buffer),
                transfers=flying * self._stored_bytes(variant, (*moved, *self._sent(first, last))),
            ),
            memory_limit=device.memory,
            in_flight=flying,
            workspace=workspace,
            updating=state + max((w.temporary for w in weights), default=0),
            host=sum(w.host for w in weights) + flying * sum(variant.offloaded[first : last + 1]),
        )


def evaluate(problem: PartitionProblem, choice: PartitionChoice) -> PartitionEvaluation:
    """Return the cost of ``choice``, by definition.

    Raises FXP109 for a choice that does not belong to this problem; one that only violates a
    constraint or a memory limit is evaluated, with its faults.
    """
    return PartitionScorer(problem).evaluate(choice)


def _well_formed(problem: PartitionProblem, choice: PartitionChoice) -> None:
    """Raise FXP109 for a choice whose numbers do not belong to the problem."""
    starts, n = choice.starts, len(problem.blocks)
    rising = all(a < b for a, b in pairwise(starts))
    why = ""
    if not starts or starts[0] != 0 or not rising or starts[-1] >= n:
        why = f"The starts {starts} do not cut {n} blocks into contiguous stages."
    elif len(starts) > len(problem.devices):
        why = f"There are {len(starts)} stages but only {len(problem.devices)} devices."
    elif not 0 <= choice.variant < len(problem.variants):
        why = f"The variant {choice.variant} is not one of {len(problem.variants)}."
    elif choice.schedule not in SCHEDULES:
        why = f"There is no schedule {choice.schedule!r}."
    check_choice(why)


def _broken_constraints(problem: PartitionProblem, choice: PartitionChoice) -> list[str]:
    """Return violated constraints other than memory, as text."""
    faults = list_forbidden(problem, len(choice.starts), choice.schedule)
    fused = set(problem.no_cut_after)
    faults.extend(f"cut after block {s - 1}" for s in choice.starts[1:] if s - 1 in fused)
    return faults
