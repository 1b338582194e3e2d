"""Explanations why no plan fits, and the smallest changes that help, each verified first."""

from __future__ import annotations

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
from fxpart.solver.work import work_seconds


def explain_infeasible(
    problem: PartitionProblem, *, time_limit: float = 10.0
) -> tuple[Problem, ...]:
    """Explain why no plan is possible, as problems to raise.

    FXP201 if there are fewer pieces than stages. FXP204 if memory is too small: for the closest
    split, its worst stage and the memory of that by cause, then changes for which a plan was
    verified to fit: memory, devices (or stages), microbatches, schedule. FXP205 if a plan does
    exist or ``time_limit`` (seconds) was too short to decide.
    """
    deadline = work_seconds() + time_limit
    pieces = PartitionSearch(problem, PartitionRecord(problem), deadline).tables.units
    most = min(pieces, problem.max_stages)
    if problem.min_stages > most:
        return (_too_few_pieces(problem, pieces),)
    try:
        if find_feasible_choice(problem, deadline) is not None:
            return (_too_little_time("A plan fits, but none was found within the time limit."),)
    except SolverTimeout:
        return (_too_little_time("The time limit was too short to decide whether a plan fits."),)
    more, choice = extra_memory(problem, deadline)
    evaluation = PartitionScorer(problem).evaluate(choice)
    return (_too_little_memory(problem, choice, evaluation, more, deadline),)


def _too_few_pieces(problem: PartitionProblem, pieces: int) -> Problem:
    some = min(pieces, problem.max_stages)
    return Problem(
        "FXP201",
        where=f"{problem.min_stages} stages, {len(problem.blocks)} blocks",
        why=f"The model can be cut into at most {pieces} pieces, for at most "
        f"{problem.max_stages} stages on {len(problem.devices)} devices.",
        fix=f"Request {some} stages or fewer." if some > 1 else "Use one stage.",
    )


def _too_little_time(why: str) -> Problem:
    return Problem("FXP205", where="solver", why=why, fix="Increase time_limit.")


def _too_little_memory(
    problem: PartitionProblem,
    choice: PartitionChoice,
    evaluation: PartitionEvaluation,
    more: int,
    deadline: float,
) -> Problem:
    """Return the worst stage of the closest split, and the fixes that were verified."""
    stages = evaluation.stages
    k = max(range(len(stages)), key=lambda s: stages[s].needed - stages[s].memory_limit)
    stage, variant = stages[k], problem.variants[choice.variant]
    over = sum(s.needed > s.memory_limit for s in stages)
    need, there = stage.needed, stage.memory_limit
    others = f"; {over - 1} more stages do not fit either" if over > 1 else ""
    return Problem(
        "FXP204",
        where=f"{_blocks(problem, stage)}, stage {k} of {len(stages)}, on "
        f"{problem.devices[k].name}: {format_byte_count(need)} needed, "
        f"{format_byte_count(there)} available{others}",
        why=f"{_parts(stage)}, with {stage.in_flight} of {variant.microbatches} microbatches in "
        f"flight, each of {variant.microbatch_size}, under {choice.schedule}; "
        "this is the closest split",
        fix="; or ".join(find_fixes(problem, more, deadline)),
    )


def _blocks(problem: PartitionProblem, stage: StageCost) -> str:
    first, last = problem.blocks[stage.first], problem.blocks[stage.last]
    return first if first == last else f"{first} … {last}"


def _parts(stage: StageCost) -> str:
    """Return a stage's memory by cause, largest first, in one unit, without zero entries."""
    causes = msgspec.structs.asdict(stage.memory)
    if stage.updating > stage.memory.total:  # its peak is in the update
        causes |= {"activations": 0, "transfers": 0, "copies": 0}
        causes["the optimizer's temporaries"] = stage.updating - sum(causes.values())
    parts = sorted(causes.items(), key=lambda part: -part[1])
    return (
        ", ".join(f"{name} {format_byte_count(size)}" for name, size in parts if size) or "nothing"
    )
