"""A model cut into as many stages as are to be emulated, each with weights of its own.

The stages take as even a time as can be, by the planner's prices for CPU devices that are all alike
and have memory enough; what they send each other does not count. A stage without weights would have
nothing to be stale, so that every cut is made right before a block that has trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from typing import Any

import msgspec
from torch import nn

from fxpart.api import Program
from fxpart.cluster.model import Cluster
from fxpart.codegen.generated_program import fields_of
from fxpart.costmodels import AUTO
from fxpart.errors import FxpartError, error
from fxpart.planner.device_assignment import StageAssignment
from fxpart.planner.mesh_plan import solve_exactly
from fxpart.planner.prepared_model import PlanningArguments, PreparedModel, prepare_model
from fxpart.pricing.partition import price
from fxpart.solver.problem import PartitionProblem

MOST_STAGES = 32

_MEMORY = 1 << 50  # bytes of each emulated device: what a stage needs is not the question here
_GRANULARITIES = ("block", "op")  # the finer one where the first has too few blocks


def cut_evenly(
    model: nn.Module,
    stages: int,
    *,
    microbatches: int,
    loss: Callable[..., Any] | None,
    example_inputs: Any,
    seed: int,
    **options: Any,
) -> Program:
    """The program of a chain of so many stages of about even time, each with trained weights.

    options: ``batch_size``, ``batch_dims``, ``precision`` and ``example_kwargs``, as for
    :func:`fxpart.compile`. Raises FXP109 for a number of stages outside 1 to 32, FXP201 where the
    model has too few blocks with weights, and what compile raises of a model or its inputs.
    """
    if not 1 <= stages <= MOST_STAGES:
        raise error(
            "FXP109",
            where=f"stages={stages}",
            why=f"1 to {MOST_STAGES} stages can be emulated",
            fix=f"give a number from 1 to {MOST_STAGES}",
        )
    most = 0
    for granularity in _GRANULARITIES:
        front = _front(
            model, stages, granularity, microbatches, loss, example_inputs, seed, options
        )
        problem = _priced(front, microbatches)
        cuts = _cuts(problem)
        most = len(cuts) + 1
        if stages <= most:
            return _program(front, even_starts(_seconds(problem), cuts, stages), microbatches)
    raise _too_few(front, stages, most)


def _front(
    model: nn.Module,
    stages: int,
    granularity: str,
    microbatches: int,
    loss: Callable[..., Any] | None,
    example_inputs: Any,
    seed: int,
    options: dict[str, Any],
) -> PreparedModel:
    """The captured model with blocks."""
    constraints: dict[str, int | float | str | bool] = {
        "mesh": "none", "stages": stages, "granularity": granularity,
    }  # fmt: skip
    if (precision := options.get("precision")) is not None:
        constraints["precision"] = precision
    return prepare_model(
        model,
        _devices(stages),
        None,
        (example_inputs, options.get("example_kwargs")),
        PlanningArguments(options.get("batch_size"), microbatches, None, AUTO, constraints, seed),
        {"loss": loss, "batch_dims": options.get("batch_dims")},
    )


def _devices(stages: int) -> Cluster:
    """This host as devices that are all alike, with memory enough for anything."""
    found = Cluster.parse(f"local:{stages}")
    wide = tuple(msgspec.structs.replace(d, memory=_MEMORY) for d in found.devices)
    return msgspec.structs.replace(found, devices=wide)


def _priced(front: PreparedModel, microbatches: int) -> PartitionProblem:
    """What cutting the model costs, for one lane of 1F1B."""
    request = front.request
    problem, _ = price(
        front.graph,
        front.captured,
        request.cluster,
        cost_model=request.cost_model,
        batch_size=front.captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
    )
    return problem


def _cuts(problem: PartitionProblem) -> list[int]:
    """The blocks after which a stage may end: both sides have weights that are trained."""
    have = sorted({block for w in problem.weights if w.gradient for block in w.blocks})
    closed = set(problem.no_cut_after)
    return [block - 1 for block in have[1:] if block - 1 not in closed]


def _seconds(problem: PartitionProblem) -> list[float]:
    """What each block takes in a step, forward, backward and update."""
    (variant,) = problem.variants
    count = variant.microbatches
    parts = zip(variant.forward[0], variant.backward[0], problem.step[0], strict=True)
    return [count * (forward + backward) + update for forward, backward, update in parts]


def even_starts(seconds: Sequence[float], cuts: Sequence[int], stages: int) -> tuple[int, ...]:
    """The first block of each stage so that the sum of the stages' squared seconds is least.

    seconds: of each block. cuts: blocks after which a stage may end, rising, at least stages - 1.
    """
    # Pieces between neighbouring cuts are moved whole; sums[i]: seconds before piece i.
    starts = [0, *(cut + 1 for cut in cuts), len(seconds)]
    sums = [fsum(seconds[:start]) for start in starts]
    pieces = len(starts) - 1
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best += [(float("inf"), ())] * pieces
    for _ in range(stages):
        best = [(float("inf"), ())] + [
            min(
                (best[first][0] + (sums[end] - sums[first]) ** 2, (*best[first][1], starts[first]))
                for first in range(end)
            )
            for end in range(1, pieces + 1)
        ]
    assert best[pieces][0] < float("inf"), "there are cuts enough"
    return best[pieces][1]


def _program(front: PreparedModel, starts: tuple[int, ...], microbatches: int) -> Program:
    """The program of these stages."""
    plan, parts = solve_exactly(
        front.request, front.captured, front.graph, front.info, microbatches, {},
        StageAssignment(starts=starts),
    )  # fmt: skip
    return Program(plan, request=front.request, **fields_of(parts))


def _too_few(front: PreparedModel, stages: int, most: int) -> FxpartError:
    fewer = "1 stage" if most == 1 else f"at most {most} stages"
    return error(
        "FXP201",
        where=f"{stages} stages of {front.info.name}",
        why=f"each stage needs trained weights of its own, and the model can be cut into {most}",
        fix=f"ask for {fewer}, or emulate a deeper model",
    )
