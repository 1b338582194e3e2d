"""Explanations why no plan fits, and the smallest changes that help, each verified first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fxpart.errors import Problem
from fxpart.solver.bounds import list_units
from fxpart.solver.evaluation import StagePeakMemory
from fxpart.solver.objective import PartitionScorer
from fxpart.solver.problem import PartitionProblem
from fxpart.solver.remedies import (
    extra_memory,
    find_feasible_choice,
    find_fixes,
    format_byte_count,
)
from fxpart.solver.work import SolverTimeout, work_seconds


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
    pieces = len(list_units(problem))
    most = min(pieces, problem.max_stages)
    if problem.min_stages > most:
        return (_too_few_pieces(problem, pieces),)
    try:
        if find_feasible_choice(problem, deadline) is not None:
            return (too_little_time("A plan fits, but none was found within the time limit."),)
    except SolverTimeout:
        return (too_little_time("The time limit was too short to decide whether a plan fits."),)
    more, choice = extra_memory(problem, deadline)
    stages = PartitionScorer(problem).evaluate(choice).stages
    variant = problem.variants[choice.variant]
    found = too_little_memory(
        problem.blocks,
        [(s.first, s.last, problem.devices[s.device].name, s) for s in stages],
        f"{variant.microbatches} microbatches in flight, each of {variant.microbatch_size}, "
        f"under {choice.schedule}",
        find_fixes(problem, more, deadline),
    )
    return (found,)


def _too_few_pieces(problem: PartitionProblem, pieces: int) -> Problem:
    some = min(pieces, problem.max_stages)
    return Problem(
        "FXP201",
        where=f"{problem.min_stages} stages, {len(problem.blocks)} blocks",
        why=f"The model can be cut into at most {pieces} pieces, for at most "
        f"{problem.max_stages} stages on {len(problem.devices)} devices.",
        fix=f"Request {some} stages or fewer." if some > 1 else "Use one stage.",
    )


def too_little_time(why: str) -> Problem:
    """Return the problem that the time limit was too short."""
    return Problem("FXP205", where="solver", why=why, fix="Increase time_limit.")


def too_little_memory(
    blocks: Sequence[str],
    stages: Sequence[tuple[int, int, str, StagePeakMemory]],
    flight: str,
    fixes: Iterable[str],
    certain: Iterable[str] = (),
) -> Problem:
    """Return the worst stage of the closest choice, and the fixes that were verified.

    stages: first and last block, device, and memory of each. flight: the microbatches of which some
    are in flight, and the schedule. certain: facts that hold for every choice.
    """
    peaks = [peak for *_, peak in stages]
    k = max(range(len(peaks)), key=lambda s: peaks[s].needed - peaks[s].memory_limit)
    first, last, device, peak = stages[k]
    name = describe_blocks(blocks, first, last)
    over = sum(not one.fits for one in peaks)
    others = f"; {over - 1} more stages do not fit either" if over > 1 else ""
    closest = f"{_parts(peak)}, with {peak.in_flight} of {flight}; this is the closest choice"
    return Problem(
        "FXP204",
        where=f"{name}, stage {k} of {len(stages)}, on {device}: {format_byte_count(peak.needed)} "
        f"needed, {format_byte_count(peak.memory_limit)} available{others}",
        why="\n".join((*certain, closest)),
        fix="; or ".join(fixes),
    )


def describe_blocks(blocks: Sequence[str], first: int, last: int) -> str:
    """Return the name of one block, or of the first and last of several."""
    return blocks[first] if first == last else f"{blocks[first]} … {blocks[last]}"


def _parts(peak: StagePeakMemory) -> str:
    """Return a stage's memory by cause, largest first, without zero entries."""
    causes = msgspec.structs.asdict(peak.memory)
    if peak.updating > peak.memory.total:  # its peak is in the update
        causes |= {"activations": 0, "transfers": 0, "copies": 0}
        causes["the optimizer's temporaries"] = peak.updating - sum(causes.values())
    parts = sorted(causes.items(), key=lambda part: -part[1])
    return (
        ", ".join(f"{name} {format_byte_count(size)}" for name, size in parts if size) or "nothing"
    )
