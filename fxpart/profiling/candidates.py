"""Select the microbatch sizes and stages of a model that are benchmarked."""

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

SIZES = 4  # Number of microbatch sizes at which ops are measured first.


@dataclass(frozen=True)
class BenchmarkStages:
    """Stages to benchmark, and the first and last block of each."""

    stages: StageBenchmarkInput
    blocks: tuple[tuple[int, int], ...]

    def parts(self, of: OpClassTimes) -> Callable[[int, int, int, bool], dict[str, float]]:
        """Return a function for predicted seconds by op class.

        Its arguments: stage, rows of a microbatch, microbatches per update, and whether gradients
        are already present.
        """

        def found(stage: int, rows: int, microbatches: int, later: bool) -> dict[str, float]:
            first, last = self.blocks[stage]
            return of(first, last, rows, later=later, microbatches=microbatches)

        return found


def sizes(problem: PartitionProblem, choices: Sequence[PartitionChoice]) -> list[int]:
    """Return microbatch rows at which ops are measured: of the best plans, and the extremes."""
    every = sorted({v.microbatch_size for v in problem.variants}, reverse=True)
    found = [problem.variants[c.variant].microbatch_size for c in choices]
    return list(dict.fromkeys([*found, every[0], every[-1]]))[:SIZES]


def add_whole_model(
    problem: PartitionProblem, choices: Sequence[PartitionChoice], most: int = 5
) -> list[PartitionChoice]:
    """Add the whole model as one stage to the best choices.

    Return the best choice, the whole model at its microbatch size and at the size with the largest
    ratio to it, and further choices up to ``most`` in all; then the whole model at every other size
    at which ops are measured. The fixed cost of calls shows only in stages of different sizes, and
    errors of op times, which differ between sizes, show in measurements of the whole model.
    """
    best = choices[0]
    rows = [variant.microbatch_size for variant in problem.variants]
    apart = [max(r / rows[best.variant], rows[best.variant] / r) for r in rows]

    def whole(variant: int) -> PartitionChoice:
        return PartitionChoice(variant=variant, schedule=best.schedule, starts=(0,))

    first = [best, whole(best.variant), whole(apart.index(max(apart)))]
    others = [whole(rows.index(size)) for size in sizes(problem, choices)]
    kept: dict[tuple[int, tuple[int, ...]], PartitionChoice] = {}
    for choice in (*first, *choices[1:]):
        kept.setdefault((choice.variant, choice.starts), choice)
    kept = dict(list(kept.items())[:most])
    for choice in others:
        kept.setdefault((choice.variant, choice.starts), choice)
    return list(kept.values())


def short_enough(problem: PartitionProblem, variant: int, seconds: float) -> PartitionChoice:
    """Return a choice whose forward and backward of one microbatch take at most ``seconds``.

    It is the whole model, with fewer rows than the variant's if needed; else the first of two
    stages. If nothing is short enough, return the shortest choice.
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
    """Return seconds of a microbatch by block, on the first type of device."""
    one = problem.variants[variant]
    return [a + b for a, b in zip(one.forward[0], one.backward[0], strict=True)]


def describe_choice(problem: PartitionProblem, choice: PartitionChoice) -> str:
    """Return a description of a choice with one rank per stage."""
    count = problem.variants[choice.variant].microbatches
    return f"{len(choice.starts)} stages of one rank, {count} microbatches"


def without_calibration(model: Any) -> CostModel:
    """Return a measured cost model with op times only."""
    bare = {
        setting: replace(found, calibrations={}, contention={})
        for setting, found in model.measurements.items()
    }
    found: CostModel = replace(model, measurements=bare)
    return found


def without_contention(model: CostModel) -> CostModel:
    """Return a measured cost model without calibration factors and CPU contention."""
    bare: Any = without_calibration(model)
    found: CostModel = replace(bare, alone=True)
    return found
