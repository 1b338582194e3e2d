"""Stages of several pieces: what a program of pieces says of the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum

import msgspec

from fxpart.plan.model import Plan, PlanTiedParameter, Stage
from fxpart.plan.prediction import PeakMemory, RankPrediction
from fxpart.planner.plan_builder import ShardingSummary, parameters_of, rank_prediction, ties_of
from fxpart.planner.prediction.descriptions import label
from fxpart.program.edges import find_stage_edges
from fxpart.program.spec import ProgramSpec
from fxpart.schedule.action import Schedule
from fxpart.schedule.in_flight import activation_peak, count_in_flight
from fxpart.schedule.make import make
from fxpart.solver.objective import PartitionScorer, StageCost
from fxpart.solver.problem import PartitionChoice, PartitionProblem


@dataclass(frozen=True)
class VirtualStageChoice:
    """A choice of pieces, and the ranks that they are folded onto.

    problem: with a device for each piece. places: by piece the plan's stage that holds it. spec:
    the program, whose stages are the pieces.
    """

    problem: PartitionProblem
    choice: PartitionChoice
    name: str
    places: tuple[int, ...]
    spec: ProgramSpec
    shared: ShardingSummary | None

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.problem.variants[self.choice.variant].microbatches

    @cached_property
    def schedule(self) -> Schedule:
        """With transfers; its ranks are the plan's stages."""
        return make(self.name, self.places, self.microbatches, find_stage_edges(self.spec))

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Of each piece, with what the schedule keeps of it in flight."""
        scorer, variant = PartitionScorer(self.problem), self.problem.variants[self.choice.variant]
        starts = self.choice.starts
        ends = (*(start - 1 for start in starts[1:]), len(self.problem.blocks) - 1)
        flying = count_in_flight(self.schedule)
        return tuple(
            scorer.stage(variant, k, first, last, max(flying[k], 1))
            for k, (first, last) in enumerate(zip(starts, ends, strict=True))
        )

    def held(self, stage: int) -> list[int]:
        """The pieces of a plan's stage, in their order."""
        return [piece for piece, place in enumerate(self.places) if place == stage]

    def onto(self, base: Plan) -> Plan:
        """The plan with these pieces on its stages; its prediction is still that of ``base``."""
        return msgspec.structs.replace(
            base,
            stages=tuple(self._stage(stage) for stage in base.stages),
            ties=self._ties(),
            microbatches=self.microbatches,
            schedule=self.name,
            edges=tuple((e.source, e.target, e.backward) for e in find_stage_edges(self.spec)),
            alternatives=(),
        )

    def rows(self, base: Plan) -> tuple[RankPrediction, ...]:
        """What each rank is predicted to need: the sum over its pieces."""
        saved = [cost.memory.activations - cost.workspace for cost in self.costs]
        kept = [s // cost.in_flight for s, cost in zip(saved, self.costs, strict=True)]
        peaks = activation_peak(self.schedule, kept)
        return tuple(self._row(stage, peaks[stage.index]) for stage in base.stages)

    def _row(self, stage: Stage, peak: int) -> RankPrediction:
        """One stage's entry. peak: bytes of activations of all its pieces at once."""
        held = self.held(stage.index)
        costs = [self.costs[piece] for piece in held]
        rows = [
            rank_prediction(stage.index, stage.ranks, cost, self._shared(turn), self.problem)
            for turn, cost in enumerate(costs)
        ]
        first, workspace = rows[0], max(row.workspace for row in rows)

        def total(name: str) -> float:
            return fsum(getattr(row, name) for row in rows)

        return msgspec.structs.replace(
            first,
            forward_seconds=total("forward_seconds"),
            backward_seconds=total("backward_seconds"),
            transfer_seconds=total("transfer_seconds"),
            sync_seconds=total("sync_seconds"),
            tie_seconds=total("tie_seconds"),
            collective_seconds=total("collective_seconds"),
            optimizer_seconds=total("optimizer_seconds"),
            memory=self._memory([row.memory for row in rows], peak + workspace),
            in_flight=max(1, -(-sum(cost.in_flight for cost in costs) // len(costs))),
            workspace=workspace,
            pieces=tuple((row.forward_seconds, row.backward_seconds) for row in rows),
        )

    def _memory(self, parts: Sequence[PeakMemory], activations: int) -> PeakMemory:
        return PeakMemory(
            weights=sum(p.weights for p in parts),
            gradients=sum(p.gradients for p in parts),
            optimizer=sum(p.optimizer for p in parts),
            activations=activations,
            buffers=sum(p.buffers for p in parts),
            transfers=sum(p.transfers for p in parts),
            sums=max(p.sums for p in parts),
        )

    def _shared(self, turn: int) -> ShardingSummary | None:
        """What is summed once a step is summed once for all pieces: with the first."""
        if self.shared is None or not turn:
            return self.shared
        return replace(self.shared, sums=replace(self.shared.sums, once=0.0))

    def _stage(self, stage: Stage) -> Stage:
        held = self.held(stage.index)
        spans = tuple((self.costs[piece].first, self.costs[piece].last) for piece in held)
        names = self.problem.blocks
        return msgspec.structs.replace(
            stage,
            first=spans[0][0],
            last=spans[-1][1],
            label=", ".join(label(names[first : last + 1]) for first, last in spans),
            pieces=spans if len(spans) > 1 else (),
            parameters=sum(parameters_of(self.spec, piece) for piece in held),
        )

    def _ties(self) -> tuple[PlanTiedParameter, ...]:
        """Ties by the plan's stages; what one stage holds twice is no tie between ranks."""
        found = []
        for tie in ties_of(self.spec):
            stages = tuple(sorted({self.places[piece] for piece in tie.stages}))
            if len(stages) > 1:
                owner = self.places[tie.owner]
                found.append(msgspec.structs.replace(tie, owner=owner, stages=stages))
        return tuple(found)
