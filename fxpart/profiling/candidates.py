"""What is worth measuring of a model: microbatch sizes, stages, and what finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fxpart.pricing.op_class_times import OpClassTimes
from fxpart.profiling.stage_benchmark import StageBenchmarkInput
from fxpart.schedule.spec import DEFAULT_SCHEDULE
from fxpart.solver.problem import PartitionChoice, PartitionProblem

if TYPE_CHECKING:
    from fxpart.costs import CostModel

SIZES = 4  # microbatch sizes at which ops are measured first


@dataclass(frozen=True)
class BenchmarkStages:
    """Stages to time, and the first and last block of each."""

    stages: StageBenchmarkInput
    blocks: tuple[tuple[int, int], ...]

    def parts(self, of: OpClassTimes) -> Callable[[int, int, int, bool], dict[str, float]]:
        """Predicted seconds by class: by stage, rows of a microbatch, how many of them an update is
        after, and whether gradients are there.
        """

        def found(stage: int, rows: int, microbatches: int, later: bool) -> dict[str, float]:
            first, last = self.blocks[stage]
            return of(first, last, rows, later=later, microbatches=microbatches)

        return found


def sizes(problem: PartitionProblem, choices: Sequence[PartitionChoice]) -> list[int]:
    """Rows of microbatches at which ops are measured: the best plans' own, and the ends."""
    every = sorted({v.microbatch_size for v in problem.variants}, reverse=True)
    found = [problem.variants[c.variant].microbatch_size for c in choices]
    return list(dict.fromkeys([*found, every[0], every[-1]]))[:SIZES]


def add_whole_model(
    problem: PartitionProblem, choices: Sequence[PartitionChoice], most: int = 5
) -> list[PartitionChoice]:
    """The best choice, the whole model as one stage at its size and at another, other choices up to
    ``most`` in all; then the whole at every other size at which ops are measured.

    What a call takes whatever it computes shows in stages of unlike sizes alone. The other size is
    the one that is furthest from the best choice's, by their ratio. Ops are good to some percent,
    and at each size others: what they come to together is known where the whole was timed.
    """
    best = choices[0]
    rows = [variant.microbatch_size for variant in problem.variants]
    apart = [max(r / rows[best.variant], rows[best.variant] / r) for r in rows]

    def whole(variant: int) -> PartitionChoice:
        return PartitionChoice(variant=variant, schedule=best.schedule, starts=(0,))

    first = [best, whole(best.variant), whole(apart.index(max(apart)))]
    rest = [whole(rows.index(size)) for size in sizes(problem, choices)]
    kept: dict[tuple[int, tuple[int, ...]], PartitionChoice] = {}
    for choice in (*first, *choices[1:]):
        kept.setdefault((choice.variant, choice.starts), choice)
    kept = dict(list(kept.items())[:most])
    for choice in rest:
        kept.setdefault((choice.variant, choice.starts), choice)
    return list(kept.values())


def short_enough(problem: PartitionProblem, variant: int, seconds: float) -> PartitionChoice:
    """The whole model where a microbatch of it takes at most so long, forward and backward.

    Else with fewer rows than the variant's; else the part of it in front that takes so long, as the
    first of two stages. The least there is, where nothing is so short.
    """
    rows = problem.variants[variant].microbatch_size
    few = [v for v, one in enumerate(problem.variants) if one.microbatch_size <= rows]
    few.sort(key=lambda v: -problem.variants[v].microbatch_size)
    for v in few:
        if sum(_by_block(problem, v)) <= seconds:
            return PartitionChoice(variant=v, schedule=DEFAULT_SCHEDULE, starts=(0,))
    ends = [
        end
        for end in range(1, len(problem.blocks))
        if problem.max_stages > 1 and end - 1 not in problem.no_cut_after
    ]
    times = _by_block(problem, few[-1])
    fitting = [end for end in ends if sum(times[:end]) <= seconds] or ends[:1]
    return PartitionChoice(variant=few[-1], schedule=DEFAULT_SCHEDULE, starts=(0, *fitting[-1:]))


def _by_block(problem: PartitionProblem, variant: int) -> list[float]:
    """Seconds of a microbatch by block, on the first type of device."""
    one = problem.variants[variant]
    return [a + b for a, b in zip(one.forward[0], one.backward[0], strict=True)]


def in_words(problem: PartitionProblem, choice: PartitionChoice) -> str:
    """A choice of stages of one rank in words."""
    count = problem.variants[choice.variant].microbatches
    return f"{len(choice.starts)} stages of one rank, {count} microbatches"


def without_calibration(model: Any) -> CostModel:
    """A measured model that knows ops alone."""
    bare = {
        setting: replace(found, calibrations={}, contention={})
        for setting, found in model.measurements.items()
    }
    found: CostModel = replace(model, measurements=bare)
    return found


def without_contention(model: CostModel) -> CostModel:
    """A measured model without factors, in a processor's seconds while all others are idle."""
    bare: Any = without_calibration(model)
    found: CostModel = replace(bare, alone=True)
    return found
