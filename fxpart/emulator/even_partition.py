"""Partition of a model into emulated stages of equal time, each with trained weights.

Stage times are as equal as possible, by the planner's prices for equal CPU devices with enough
memory; communication is ignored. A stage without weights has no staleness, so every boundary is
right before a block with trained weights.
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

_MEMORY = 1 << 50  # bytes of each emulated device; memory is no limit here
_GRANULARITIES = ("block", "op")  # the finer one if blocks are too few


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
    """Return the program of a chain of stages of about equal time, each with trained weights.

    options: ``batch_size``, ``batch_dims``, ``precision`` and ``example_kwargs``, as for
    :func:`fxpart.compile`. Raises FXP109 for a number of stages outside 1 to 32, FXP201 if the
    model has too few blocks with weights, and what compile raises for the model or its inputs.
    """
    if not 1 <= stages <= MOST_STAGES:
        raise error(
            "FXP109",
            where=f"stages={stages}",
            why=f"1 to {MOST_STAGES} stages can be emulated",
            fix=f"use 1 to {MOST_STAGES} stages",
        )
    largest = 0
    for granularity in _GRANULARITIES:
        prepared = _prepare(
            model, stages, granularity, microbatches, loss, example_inputs, seed, options
        )
        problem = _price_partition(prepared, microbatches)
        cuts = _list_cuts(problem)
        largest = len(cuts) + 1
        if stages <= largest:
            return _make_program(
                prepared, even_starts(_compute_block_seconds(problem), cuts, stages), microbatches
            )
    raise _make_too_few_error(prepared, stages, largest)


def _prepare(
    model: nn.Module,
    stages: int,
    granularity: str,
    microbatches: int,
    loss: Callable[..., Any] | None,
    example_inputs: Any,
    seed: int,
    options: dict[str, Any],
) -> PreparedModel:
    """Capture the model and divide it into blocks."""
    constraints: dict[str, int | float | str | bool] = {
        "mesh": "none", "stages": stages, "granularity": granularity,
    }  # fmt: skip
    if (precision := options.get("precision")) is not None:
        constraints["precision"] = precision
    return prepare_model(
        model,
        _make_devices(stages),
        None,
        (example_inputs, options.get("example_kwargs")),
        PlanningArguments(options.get("batch_size"), microbatches, None, AUTO, constraints, seed),
        {"loss": loss, "batch_dims": options.get("batch_dims")},
    )


def _make_devices(stages: int) -> Cluster:
    """Return this host as equal devices with enough memory."""
    found = Cluster.parse(f"local:{stages}")
    with_memory = tuple(msgspec.structs.replace(d, memory=_MEMORY) for d in found.devices)
    return msgspec.structs.replace(found, devices=with_memory)


def _price_partition(prepared: PreparedModel, microbatches: int) -> PartitionProblem:
    """Price the partition problem, for one mesh rank and 1F1B."""
    request = prepared.request
    problem, _ = price(
        prepared.graph,
        prepared.captured,
        request.cluster,
        cost_model=request.cost_model,
        batch_size=prepared.captured.batch_size,
        microbatches=microbatches,
        optimizer=request.optimizer,
    )
    return problem


def _list_cuts(problem: PartitionProblem) -> list[int]:
    """Return the blocks after which a stage may end, with trained weights on both sides."""
    have = sorted({block for w in problem.weights if w.gradient for block in w.blocks})
    forbidden = set(problem.no_cut_after)
    return [block - 1 for block in have[1:] if block - 1 not in forbidden]


def _compute_block_seconds(problem: PartitionProblem) -> list[float]:
    """Return the step time of each block in seconds: forward, backward and update."""
    (variant,) = problem.variants
    count = variant.microbatches
    parts = zip(variant.forward[0], variant.backward[0], problem.step[0], strict=True)
    return [count * (forward + backward) + update for forward, backward, update in parts]


def even_starts(seconds: Sequence[float], cuts: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the first block of each stage that minimizes the sum of squared stage times.

    seconds: of each block. cuts: blocks after which a stage may end, ascending, at least stages -
    1.
    """
    # Pieces between adjacent cuts are not split; sums[i]: seconds before piece i.
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
    assert best[pieces][0] < float("inf"), "there are enough cuts"
    return best[pieces][1]


def _make_program(prepared: PreparedModel, starts: tuple[int, ...], microbatches: int) -> Program:
    """Return the program of these stages."""
    plan, parts = solve_exactly(
        prepared.request, prepared.captured, prepared.graph, prepared.info, microbatches, {},
        StageAssignment(starts=starts),
    )  # fmt: skip
    return Program(plan, request=prepared.request, **fields_of(parts))


def _make_too_few_error(prepared: PreparedModel, stages: int, largest: int) -> FxpartError:
    fewer = "1 stage" if largest == 1 else f"at most {largest} stages"
    return error(
        "FXP201",
        where=f"{stages} stages of {prepared.info.name}",
        why=f"each stage needs trained weights, and the model has only {largest} such stages",
        fix=f"request {fewer}, or emulate a deeper model",
    )
