"""Virtual stages: the plan and predictions of ranks with several stages of the program."""

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
from fxpart.solver.schedule_costs import splits_backward


@dataclass(frozen=True)
class VirtualStageChoice:
    """A choice of virtual stages, and the plan's stages that they belong to.

    problem: with a device for each virtual stage. places: the plan's stage of each virtual stage.
    spec: the program, whose stages are the virtual stages.
    """

    problem: PartitionProblem
    choice: PartitionChoice
    name: str
    places: tuple[int, ...]
    spec: ProgramSpec
    shared: ShardingSummary | None

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per step."""
        return self.problem.variants[self.choice.variant].microbatches

    @cached_property
    def schedule(self) -> Schedule:
        """Return the schedule with transfers; its ranks are the plan's stages."""
        return make(self.name, self.places, self.microbatches, find_stage_edges(self.spec))

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Return the costs of each virtual stage, with its microbatches in flight."""
        scorer, variant = PartitionScorer(self.problem), self.problem.variants[self.choice.variant]
        starts = self.choice.starts
        ends = (*(start - 1 for start in starts[1:]), len(self.problem.blocks) - 1)
        flying = count_in_flight(self.schedule)
        return tuple(
            scorer.stage(
                variant, k, first, last, max(flying[k], 1), split=splits_backward(self.name)
            )
            for k, (first, last) in enumerate(zip(starts, ends, strict=True))
        )

    def get_virtual_stages(self, stage: int) -> list[int]:
        """Return the virtual stages of a plan's stage, in order."""
        return [piece for piece, place in enumerate(self.places) if place == stage]

    def onto(self, base: Plan) -> Plan:
        """Return the plan with these virtual stages; its prediction is still that of ``base``."""
        return msgspec.structs.replace(
            base,
            stages=tuple(self._stage(stage) for stage in base.stages),
            ties=self._list_ties(),
            microbatches=self.microbatches,
            schedule=self.name,
            edges=tuple((e.source, e.target, e.backward) for e in find_stage_edges(self.spec)),
            alternatives=(),
        )

    def rows(self, base: Plan) -> tuple[RankPrediction, ...]:
        """Return the prediction of each rank: the sum over its virtual stages."""
        saved = [cost.memory.activations - cost.workspace for cost in self.costs]
        per_microbatch = [s // cost.in_flight for s, cost in zip(saved, self.costs, strict=True)]
        peaks = activation_peak(self.schedule, per_microbatch)
        return tuple(self._row(stage, peaks[stage.index]) for stage in base.stages)

    def _row(self, stage: Stage, peak: int) -> RankPrediction:
        """Return one stage's prediction. peak: activation bytes of all its virtual stages."""
        virtual_stages = self.get_virtual_stages(stage.index)
        costs = [self.costs[piece] for piece in virtual_stages]
        rows = [
            rank_prediction(stage.index, stage.ranks, cost, self._shared(position), self.problem)
            for position, cost in enumerate(costs)
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
            host=sum(row.host for row in rows),
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

    def _shared(self, position: int) -> ShardingSummary | None:
        """Count the reductions per step with the first virtual stage only."""
        if self.shared is None or not position:
            return self.shared
        return replace(self.shared, sums=replace(self.shared.sums, once=0.0))

    def _stage(self, stage: Stage) -> Stage:
        virtual_stages = self.get_virtual_stages(stage.index)
        spans = tuple((self.costs[piece].first, self.costs[piece].last) for piece in virtual_stages)
        names = self.problem.blocks
        return msgspec.structs.replace(
            stage,
            first=spans[0][0],
            last=spans[-1][1],
            label=", ".join(label(names[first : last + 1]) for first, last in spans),
            pieces=spans if len(spans) > 1 else (),
            recompute=self.costs[virtual_stages[0]].recompute,
            parameters=sum(parameters_of(self.spec, piece) for piece in virtual_stages),
        )

    def _list_ties(self) -> tuple[PlanTiedParameter, ...]:
        """Return ties between the plan's stages, without those inside one stage."""
        found = []
        for tie in ties_of(self.spec):
            stages = tuple(sorted({self.places[piece] for piece in tie.stages}))
            if len(stages) > 1:
                owner = self.places[tie.owner]
                found.append(msgspec.structs.replace(tie, owner=owner, stages=stages))
        return tuple(found)
