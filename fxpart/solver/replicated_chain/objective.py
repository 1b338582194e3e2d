"""Objective of replicated stages: cost and memory of a choice.

A replica of kind k takes w_k seconds for a microbatch (forward, backward, received values). The m
microbatches are distributed over the replicas of a group so that the longest takes as little as
possible: M seconds (:mod:`.round_robin`). Per step a group pays beta: the optimizer, tied-parameter
gradient reduction, and the gradient reduction of its n replicas, which the runtime does on one of
them, with n - 1 messages in and n - 1 out (:mod:`fxpart.runtime.gradients.stage_replicas`). During
that it needs additional memory (:mod:`.gradient_reduction`). With t the slowest replica's w the
objective is

    T = sum over groups of t + max over groups of (M - t + beta)

which for groups of one replica is that of :mod:`fxpart.solver.objective`: M = m t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import fsum

from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.evaluation import check_choice
from fxpart.solver.objective import PartitionScorer, StageCost
from fxpart.solver.replicated_chain.gradient_reduction import (
    compute_sparse_row_fraction,
    count_reduction_workspace,
    list_group_weights,
)
from fxpart.solver.replicated_chain.problem import ReplicatedChainChoice, ReplicatedChainProblem
from fxpart.solver.replicated_chain.round_robin import assign_round_robin


@dataclass(frozen=True)
class ReplicaGroupCost:
    """One group: blocks [first, last], and the kind and cost of each replica.

    turns: by microbatch, the replica that runs it. slowest, longest: t and M; once: beta, of which
    ``sums`` is the gradient reduction of the replicas. summing: additional bytes during that.
    """

    first: int
    last: int
    kinds: tuple[int, ...]
    copies: tuple[StageCost, ...]
    turns: tuple[int, ...]
    slowest: float
    longest: float
    once: float
    sums: float
    summing: int = 0

    def with_costs(self, copies: Sequence[StageCost]) -> ReplicaGroupCost:
        """Return the same replicas with the same routing, at other costs."""
        taken = [self.turns.count(copy) for copy in range(len(copies))]
        return replace(
            self,
            copies=tuple(copies),
            slowest=max(cost.seconds for cost in copies),
            longest=max(n * cost.seconds for n, cost in zip(taken, copies, strict=True)),
            once=max(cost.step_only_seconds for cost in copies) + self.sums,
        )

    @property
    def pace(self) -> float:
        """Return the seconds between two microbatches if all replicas work: c / n_c, g / n_g."""
        return 1 / fsum(1 / cost.seconds if cost.seconds else 1e300 for cost in self.copies)

    def while_summing(self, copy: StageCost) -> int:
        """Return the bytes of a replica during gradient reduction, between its passes and the
        optimizer."""
        m = copy.memory
        return m.weights + m.gradients + m.optimizer + m.buffers + self.summing


@dataclass(frozen=True)
class ReplicatedChainEvaluation:
    """A choice's seconds, its groups, and its violations."""

    seconds: float
    groups: tuple[ReplicaGroupCost, ...]
    faults: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Return whether it fits every memory and satisfies every constraint."""
        return not self.faults


class ReplicatedChainScorer:
    """Evaluates many choices of one problem."""

    def __init__(self, problem: ReplicatedChainProblem) -> None:
        """Index the problem."""
        self.problem = problem
        self.base = problem.by_kind
        self._scorer = PartitionScorer(self.base)

    def evaluate(self, choice: ReplicatedChainChoice) -> ReplicatedChainEvaluation:
        """Return the cost of the choice.

        Raise FXP109 for one that does not belong to this problem.
        """
        problem, base = self.problem, self.problem.base
        _well_formed(problem, choice)
        m = base.variants[choice.variant].microbatches
        ends = (*(start - 1 for start in choice.starts[1:]), len(base.blocks) - 1)
        spans = list(zip(choice.starts, ends, strict=True))
        rounds = [
            self._turns(choice, first, last, counts)
            for (first, last), counts in zip(spans, choice.counts, strict=True)
        ]
        flying = _in_flight(choice.schedule, rounds, [sum(c) for c in choice.counts], m)
        groups = tuple(
            self._group(choice, span, counts, own, flights)
            for span, counts, own, flights in zip(spans, choice.counts, rounds, flying, strict=True)
        )
        return evaluation_of(groups, tuple(self._faults(choice, groups)))

    def _turns(
        self, choice: ReplicatedChainChoice, first: int, last: int, counts: tuple[int, ...]
    ) -> tuple[int, ...]:
        variant = self.problem.base.variants[choice.variant]
        each = [
            self._scorer.stage(variant, kind + 1, first, last, 1).seconds for kind in _kinds(counts)
        ]
        return assign_round_robin(each, variant.microbatches)

    def _group(
        self,
        choice: ReplicatedChainChoice,
        span: tuple[int, int],
        counts: tuple[int, ...],
        order: tuple[int, ...],
        flying: tuple[int, ...],
    ) -> ReplicaGroupCost:
        variant, kinds = self.problem.base.variants[choice.variant], _kinds(counts)
        copies = tuple(
            self._scorer.stage(variant, kind + 1, *span, max(1, flights))
            for kind, flights in zip(kinds, flying, strict=True)
        )
        used = [self.problem.kinds[kind] for kind in set(kinds)]
        held = list_group_weights(self.base.weights, *span)
        rows = sum(w.rows for w in held)
        sent = sum(w.gradient for w in held if not w.sparse) + rows * compute_sparse_row_fraction(
            len(copies)
        )
        line = max(k.latency for k in used) + sent * max(k.inverse_bandwidth for k in used)
        sums = 2 * (len(copies) - 1) * line if sent else 0.0
        summing = count_reduction_workspace([w.gradient for w in held]) if len(copies) > 1 else 0
        made = ReplicaGroupCost(*span, kinds, copies, order, 0.0, 0.0, 0.0, sums, summing)
        return made.with_costs(copies)

    def _faults(
        self, choice: ReplicatedChainChoice, groups: tuple[ReplicaGroupCost, ...]
    ) -> list[str]:
        problem, base = self.problem, self.problem.base
        faults = []
        if not base.min_stages <= len(groups) <= base.max_stages:
            faults.append(f"{len(groups)} groups")
        if choice.schedule not in base.schedules:
            faults.append(f"schedule {choice.schedule}")
        fused = set(base.no_cut_after)
        faults += [f"cut after block {s - 1}" for s in choice.starts[1:] if s - 1 in fused]
        for kind, counts in zip(problem.kinds, zip(*choice.counts, strict=True), strict=True):
            if sum(counts) > kind.devices:
                faults.append(f"{sum(counts)} of {kind.devices} {kind.name}")
        count = sum(map(sum, choice.counts))
        if problem.ranks and count != problem.ranks:
            faults.append(f"{count} devices instead of {problem.ranks}")
        for number, group in enumerate(groups):
            if len(set(group.turns)) < len(group.copies):
                faults.append(f"group {number} has a replica without a microbatch")
            for place, cost in set(zip(group.kinds, group.copies, strict=True)):
                needed = max(cost.needed, group.while_summing(cost))
                if needed > cost.memory_limit:
                    faults.append(
                        f"group {number} needs {needed} bytes of {cost.memory_limit}"
                        f" ({problem.kinds[place].name})"
                    )
        return faults


def evaluation_of(
    groups: Sequence[ReplicaGroupCost], faults: tuple[str, ...] = ()
) -> ReplicatedChainEvaluation:
    """Return T of these groups."""
    longest = max(group.longest - group.slowest + group.once for group in groups)
    seconds = fsum(group.slowest for group in groups) + longest
    return ReplicatedChainEvaluation(seconds, tuple(groups), faults)


def evaluate(
    problem: ReplicatedChainProblem, choice: ReplicatedChainChoice
) -> ReplicatedChainEvaluation:
    """Return the cost of ``choice``, by definition."""
    return ReplicatedChainScorer(problem).evaluate(choice)


def _kinds(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the kind of each replica, kinds in their order."""
    return tuple(kind for kind, n in enumerate(counts) for _ in range(n))


def _in_flight(
    schedule: str, rounds: list[tuple[int, ...]], sizes: list[int], microbatches: int
) -> list[tuple[int, ...]]:
    """Return by group and replica the most microbatches in flight under the schedule."""
    firsts = [0, *accumulate(sizes)]
    groups = [
        tuple(first + copy for copy in order)
        for first, order, size in zip(firsts, rounds, sizes, strict=False)
        if size > 1
    ]
    found = SCHEDULES[schedule].in_flight(range(firsts[-1]), microbatches, groups)
    return [found[a:b] for a, b in pairwise(firsts)]


def _well_formed(problem: ReplicatedChainProblem, choice: ReplicatedChainChoice) -> None:
    """Raise FXP109 for a choice whose numbers do not belong to the problem."""
    starts, n = choice.starts, len(problem.base.blocks)
    rising = all(a < b for a, b in pairwise(starts))
    why = ""
    if not starts or starts[0] != 0 or not rising or starts[-1] >= n:
        why = f"The starts {starts} do not cut {n} blocks into contiguous groups."
    elif len(choice.counts) != len(starts) or any(
        len(c) != len(problem.kinds) or min(c) < 0 or sum(c) < 1 for c in choice.counts
    ):
        why = f"Each of {len(starts)} groups needs a number for each of {len(problem.kinds)} kinds."
    elif not 0 <= choice.variant < len(problem.base.variants):
        why = f"The variant {choice.variant} is not one of {len(problem.base.variants)}."
    check_choice(why)
