"""What is worth measuring of a model: microbatch sizes, stages, and what finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.measuring.stages import StageWork
from fxpart.pricing.parts import StageParts
from fxpart.solver.problem import Choice, PartitionProblem

if TYPE_CHECKING:
    from fxpart.costs import CostModel

SIZES = 4  # microbatch sizes at which ops are measured first


@dataclass(frozen=True)
class Work:
    """Stages to time, and the first and last block of each."""

    stages: StageWork
    blocks: tuple[tuple[int, int], ...]

    def parts(self, of: StageParts) -> Callable[[int, int, bool], dict[str, float]]:
        """By stage, rows, and whether gradients are there: predicted seconds by class."""

        def found(stage: int, rows: int, later: bool) -> dict[str, float]:
            first, last = self.blocks[stage]
            return of(first, last, rows, later=later)

        return found


def sizes(problem: PartitionProblem, choices: Sequence[Choice]) -> list[int]:
    """Rows of microbatches at which ops are measured: the best plans' own, and the ends."""
    every = sorted({v.microbatch_size for v in problem.variants}, reverse=True)
    found = [problem.variants[c.variant].microbatch_size for c in choices]
    return list(dict.fromkeys([*found, every[0], every[-1]]))[:SIZES]


def with_wholes(choices: Sequence[Choice]) -> list[Choice]:
    """The best choice, the whole model as one stage at its size, then the others."""
    best = choices[0]
    whole = Choice(variant=best.variant, schedule=best.schedule, starts=(0,))
    kept: dict[tuple[int, tuple[int, ...]], Choice] = {}
    for choice in (best, whole, *choices[1:]):
        kept.setdefault((choice.variant, choice.starts), choice)
    return list(kept.values())


def in_words(problem: PartitionProblem, choice: Choice) -> str:
    """A choice of stages of one rank in words."""
    count = problem.variants[choice.variant].microbatches
    return f"{len(choice.starts)} stages of one rank, {count} microbatches"


def unfitted(model: Any) -> CostModel:
    """A measured model that knows ops alone."""
    bare = {
        setting: replace(found, calibrations={}, crowding={})
        for setting, found in model.measurements.items()
    }
    found: CostModel = replace(model, measurements=bare)
    return found


def alone(model: CostModel) -> CostModel:
    """A measured model without factors, for a device beside which all others are idle."""
    bare: Any = unfitted(model)
    cluster = msgspec.structs.replace(bare.cluster, hosts=msgspec.UNSET)
    found: CostModel = replace(bare, cluster=cluster)
    return found
