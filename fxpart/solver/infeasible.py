"""Why no plan fits, and the smallest changes that help, each tried before it is offered."""

from __future__ import annotations

import time

import msgspec

from fxpart.errors import Problem
from fxpart.solver.objective import PartitionEvaluation, PartitionScorer, StageCost
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.remedies import (
    extra_memory,
    find_feasible_choice,
    find_fixes,
    format_byte_count,
)
from fxpart.solver.search import PartitionRecord, PartitionSearch
from fxpart.solver.suffix_dp import SolverTimeout


def explain_infeasible(
    problem: PartitionProblem, *, time_limit: float = 10.0
) -> tuple[Problem, ...]:
    """What stands in the way of any plan, as problems to raise.

    FXP201 where fewer pieces than stages exist, FXP204 where memory is too small: for the split
    that comes closest, its worst stage and what that needs by part, then the changes that were
    tried and do make a plan fit: memory, devices (or stages), microbatches, schedule. FXP205 where
    a plan does exist or ``time_limit`` (seconds) was too short to know.
    """
    deadline = time.monotonic() + time_limit
    pieces = PartitionSearch(
        problem, PartitionRecord(PartitionScorer(problem)), deadline
    ).tables.units
    most = min(pieces, problem.max_stages)
    if problem.min_stages > most:
        return (_too_few_pieces(problem, pieces),)
    try:
        if find_feasible_choice(problem, deadline) is not None:
            return (_too_little_time("a plan fits, but none was found in time"),)
    except SolverTimeout:
        return (_too_little_time("whether a plan fits was not settled in time"),)
    more, choice = extra_memory(problem, deadline)
    evaluation = PartitionScorer(problem).evaluate(choice)
    return (_too_little_memory(problem, choice, evaluation, more, deadline),)


def _too_few_pieces(problem: PartitionProblem, pieces: int) -> Problem:
    some = min(pieces, problem.max_stages)
    return Problem(
        "FXP201",
        where=f"{problem.min_stages} stages, {len(problem.blocks)} blocks",
        why=f"the model can be cut into {pieces} pieces at most, for at most "
        f"{problem.max_stages} stages on {len(problem.devices)} devices",
        fix=f"ask for {some} stages or fewer" if some > 1 else "use one stage",
    )


def _too_little_time(why: str) -> Problem:
    return Problem("FXP205", where="solver", why=why, fix="allow more seconds (time_limit)")


def _too_little_memory(
    problem: PartitionProblem,
    choice: PartitionChoice,
    evaluation: PartitionEvaluation,
    more: int,
    deadline: float,
) -> Problem:
    """The worst stage of the closest split, and the fixes that were tried."""
    stages = evaluation.stages
    k = max(range(len(stages)), key=lambda s: stages[s].needed - stages[s].memory_limit)
    stage, variant = stages[k], problem.variants[choice.variant]
    over = sum(s.needed > s.memory_limit for s in stages)
    need, there = stage.needed, stage.memory_limit
    others = f", and {over - 1} more stages like it" if over > 1 else ""
    return Problem(
        "FXP204",
        where=f"{_blocks(problem, stage)}, stage {k} of {len(stages)}, on "
        f"{problem.devices[k].name}: {format_byte_count(need)} needed, "
        f"{format_byte_count(there)} there{others}",
        why=f"{_parts(stage)}, with {stage.in_flight} of {variant.microbatches} microbatches in "
        f"flight, each of {variant.microbatch_size}, under {choice.schedule}; "
        "no split comes closer",
        fix="; or ".join(find_fixes(problem, more, deadline)),
    )


def _blocks(problem: PartitionProblem, stage: StageCost) -> str:
    first, last = problem.blocks[stage.first], problem.blocks[stage.last]
    return first if first == last else f"{first} … {last}"


def _parts(stage: StageCost) -> str:
    """A stage's memory by cause, largest first, in one unit, without what is nothing."""
    causes = msgspec.structs.asdict(stage.memory)
    if stage.updating > stage.memory.total:  # its worst moment is after the passes
        causes |= {"activations": 0, "transfers": 0, "copies": 0}
        causes["the optimizer's temporaries"] = stage.updating - sum(causes.values())
    parts = sorted(causes.items(), key=lambda part: -part[1])
    return (
        ", ".join(f"{name} {format_byte_count(size)}" for name, size in parts if size) or "nothing"
    )
