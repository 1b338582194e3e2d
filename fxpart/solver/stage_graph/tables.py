"""Costs of any set of blocks as a stage, cached: solvers request them thousands of times.

Sums have another order than in the objective, so they may differ in the last bits; choices are
evaluated by :func:`fxpart.solver.stage_graph.objective.evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fxpart.solver.objective import count_tied_reduction_messages, get_tied_reduction_link
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.schedule_costs import keeps_all
from fxpart.solver.stage_graph.block_graph import BlockGraph, members
from fxpart.solver.stage_graph.problem import StageGraphChoice


@dataclass(frozen=True, slots=True)
class BlockSetCost:
    """A set of blocks as a stage: seconds per microbatch and per step, and bytes.

    standing: bytes independent of microbatches in flight; each: bytes per microbatch in flight.
    updating: bytes during the optimizer step.
    """

    seconds: float
    once: float
    standing: int
    each: int
    updating: int

    def needed(self, flying: int) -> int:
        """Return the peak bytes with so many microbatches in flight."""
        return max(self.standing + flying * self.each, self.updating)


class StageGraphTables:
    """One variant under one schedule."""

    def __init__(
        self, problem: PartitionProblem, variant: int, schedule: str, graph: BlockGraph
    ) -> None:
        """graph: that of the problem's blocks."""
        self.problem, self.graph = problem, graph
        self.index, self.schedule = variant, schedule
        self.variant = problem.variants[variant]
        self.m = self.variant.microbatches
        self._kind = [(d.type, d.latency, d.inverse_bandwidth) for d in problem.devices]
        self._links = [get_tied_reduction_link(problem, k) for k in range(len(problem.devices))]
        self._known: dict[tuple[int, object], BlockSetCost] = {}
        self._keys = list(zip(self._kind, self._links, strict=True))
        self._consumers = [sum(1 << c for c in v.consumers) for v in problem.values]
        self._used: list[list[int]] = [[] for _ in problem.blocks]
        self._made: list[list[int]] = [[] for _ in problem.blocks]
        self._held: list[list[int]] = [[] for _ in problem.blocks]
        for v, value in enumerate(problem.values):
            for c in value.consumers:
                self._used[c].append(v)
            if not value.saved:
                self._made[value.producer].append(v)
        for w, weight in enumerate(problem.weights):
            for b in weight.blocks:
                self._held[b].append(w)
        self._span = [sum(1 << b for b in w.blocks) for w in problem.weights]

    def flying(self, depth: int) -> int:
        """Return the microbatches in flight on a stage of that depth."""
        return self.m if keeps_all(self.schedule) else min(self.m, depth)

    def parts(self, blocks: int, stage: int) -> BlockSetCost:
        """Return the cost of a set of blocks on the device of that stage."""
        key = (blocks, self._keys[stage])
        if key not in self._known:
            self._known[key] = self._parts(blocks, stage)
        return self._known[key]

    def _parts(self, blocks: int, stage: int) -> BlockSetCost:
        problem, one = self.problem, self.variant
        kind, latency, inverse = self._kind[stage]
        inside = list(members(blocks))
        values, weights = problem.values, problem.weights
        received = {
            v for b in inside for v in self._used[b] if not blocks >> values[v].producer & 1
        }
        sent = [v for b in inside for v in self._made[b] if self._consumers[v] & ~blocks]
        held = sorted({w for b in inside for w in self._held[b]})
        lag, slow = self._links[stage]
        seconds = sum(one.forward[kind][b] + one.backward[kind][b] for b in inside)
        seconds += 2 * problem.action
        seconds += sum(
            values[v].trips * (latency + one.value_bytes[v] * inverse) for v in sorted(received)
        )
        once = problem.once + sum(problem.step[kind][b] for b in inside)
        once += sum(
            count_tied_reduction_messages(self.m) * (lag + weights[w].gradient * slow)
            for w in held
            if weights[w].gradient and self._span[w] & ~blocks
        )
        state = sum(weights[w].weight + weights[w].gradient + weights[w].optimizer for w in held)
        crossing = sum(one.value_bytes[v] * values[v].widened for v in (*received, *sent))
        return BlockSetCost(
            seconds,
            once,
            state + max((one.workspace[b] for b in inside), default=0),
            sum(one.activation[b] for b in inside) + crossing,
            state + max((weights[w].temporary for w in held), default=0),
        )

    def judge(self, stages: Sequence[int]) -> tuple[float, float]:
        """Return bytes beyond the memories, and the step time in seconds; stages in topological
        order."""
        later = self.later(stages)
        tail, deep = [0.0] * len(stages), [1] * len(stages)
        longest, over = 0.0, 0
        for k in reversed(range(len(stages))):
            part = self.parts(stages[k], k)
            for q in later[k]:
                tail[k] = max(tail[k], tail[q])
                deep[k] = max(deep[k], deep[q] + 1)
            tail[k] += part.seconds
            longest = max(longest, (self.m - 1) * part.seconds + part.once)
            need = part.needed(self.flying(deep[k]))
            over += max(0, need - self.problem.devices[k].memory)
        return over, max(tail, default=inf) + longest

    def later(self, stages: Sequence[int]) -> list[list[int]]:
        """Return per stage the stages that read from it."""
        after = self.graph.after
        found = []
        for k, blocks in enumerate(stages):
            reach = 0
            for b in members(blocks):
                reach |= after[b]
            reach &= ~blocks
            found.append([q for q in range(len(stages)) if q != k and stages[q] & reach])
        return found

    def sorted(self, stages: Sequence[int]) -> list[int] | None:
        """Return the same stages in a topological order, None if there is none.

        Of several candidates, the one with the first block comes next.
        """
        later = self.later(stages)
        waiting = [0] * len(stages)
        for row in later:
            for q in row:
                waiting[q] += 1
        order = sorted(range(len(stages)), key=lambda k: stages[k] & -stages[k])
        done, result = [False] * len(stages), list[int]()
        while len(result) < len(stages):
            k = next((k for k in order if not done[k] and not waiting[k]), -1)
            if k < 0:
                return None
            done[k] = True
            result.append(stages[k])
            for q in later[k]:
                waiting[q] -= 1
        return result

    def choice(self, stages: Sequence[int]) -> StageGraphChoice:
        """Return stages as a choice."""
        home = {b: k for k, blocks in enumerate(stages) for b in members(blocks)}
        return StageGraphChoice(
            variant=self.index,
            schedule=self.schedule,
            stage_of=tuple(home[b] for b in range(len(home))),
        )
