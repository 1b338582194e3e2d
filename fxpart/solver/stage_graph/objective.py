"""Cost of a stage graph: the chain objective, with the longest path in place of the sum.

    T = longest path of t_s over the stage graph + max_s((m - 1) t_s + beta_s)

A stage has min(m, depth) microbatches in flight under 1F1B, where depth is the number of stages on
the longest path from it to an end, itself included; m under GPipe. If the stages form a chain, this
equals :func:`fxpart.solver.objective.evaluate` bit for bit. As there, T is exact for stages of
equal forward and backward, and otherwise the measure of the search; the time of a plan is that of
its simulated schedule.
"""

from __future__ import annotations

from math import fsum

from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.evaluation import check_choice, list_forbidden, list_overfull
from fxpart.solver.objective import PartitionEvaluation, PartitionScorer
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.schedule_costs import count_stage_in_flight
from fxpart.solver.stage_graph.block_graph import BlockGraph, members, regroup
from fxpart.solver.stage_graph.problem import StageGraphChoice


def evaluate(problem: PartitionProblem, choice: StageGraphChoice) -> PartitionEvaluation:
    """Return the cost of ``choice``, by definition; blocks are numbered in the choice's order.

    Raises FXP109 for a choice that is not an acyclic graph of stages of this problem; one that only
    violates a constraint or a memory limit is evaluated, with its faults.
    """
    _well_formed(problem, choice)
    order, starts = choice.order, choice.starts
    moved = problem
    if order != tuple(range(len(order))):
        moved = regroup(problem, [(b,) for b in order])
    later = stage_edges(problem, choice.stage_of)
    deep = depths(later)
    variant = moved.variants[choice.variant]
    m = variant.microbatches
    ends = (*(start - 1 for start in starts[1:]), len(order) - 1)
    scorer = PartitionScorer(moved)
    stages = tuple(
        scorer.stage(variant, k, first, last, count_stage_in_flight(choice.schedule, m, deep[k], 0))
        for k, (first, last) in enumerate(zip(starts, ends, strict=True))
    )
    path = longest_path([s.seconds for s in stages], later)
    longest = max((m - 1) * s.seconds + s.step_only_seconds for s in stages)
    found = _faults(problem, choice)
    found += list_overfull(stages, [device.name for device in problem.devices])
    seconds = fsum(stages[k].seconds for k in path) + longest
    return PartitionEvaluation(seconds=seconds, stages=stages, faults=tuple(found))


def convert_chain_choice(problem: PartitionProblem, choice: PartitionChoice) -> StageGraphChoice:
    """Return a chain's choice as a stage graph: the same blocks on the same stages."""
    ends = (*choice.starts[1:], len(problem.blocks))
    sizes = [end - start for start, end in zip(choice.starts, ends, strict=True)]
    return StageGraphChoice(
        variant=choice.variant,
        schedule=choice.schedule,
        stage_of=tuple(k for k, size in enumerate(sizes) for _ in range(size)),
    )


def stage_edges(problem: PartitionProblem, stage_of: tuple[int, ...]) -> list[set[int]]:
    """Return per stage the stages that read its values."""
    later: list[set[int]] = [set() for _ in range(max(stage_of) + 1)]
    for value in problem.values:
        source = stage_of[value.producer]
        later[source] |= {stage_of[c] for c in value.consumers} - {source}
    return later


def depths(later: list[set[int]]) -> list[int]:
    """Return per stage the stages on the longest path from it to an end, itself included."""
    found = [1] * len(later)
    for k in reversed(range(len(later))):
        found[k] = 1 + max((found[q] for q in later[k]), default=0)
    return found


def longest_path(seconds: list[float], later: list[set[int]]) -> list[int]:
    """Return the stages of a longest path, in order; of equally long ones that of the lowest
    stages."""
    tail, following = list(seconds), [-1] * len(seconds)
    for k in reversed(range(len(seconds))):
        if later[k]:
            following[k] = max(sorted(later[k]), key=lambda q: tail[q])
            tail[k] = seconds[k] + tail[following[k]]
    at, path = max(range(len(seconds)), key=lambda k: tail[k]), []
    while at >= 0:
        path.append(at)
        at = following[at]
    return path


def _well_formed(problem: PartitionProblem, choice: StageGraphChoice) -> None:
    """Raise FXP109 for a choice whose numbers do not belong to the problem."""
    stages, why = choice.stage_of, ""
    if len(stages) != len(problem.blocks) or {*stages} != {*range(len({*stages}))}:
        why = f"{len(stages)} of {len(problem.blocks)} blocks are on stages {sorted({*stages})}."
    elif len({*stages}) > len(problem.devices):
        why = f"There are {len({*stages})} stages but only {len(problem.devices)} devices."
    elif not 0 <= choice.variant < len(problem.variants):
        why = f"The variant {choice.variant} is not one of {len(problem.variants)}."
    elif choice.schedule not in SCHEDULES:
        why = f"There is no schedule {choice.schedule!r}."
    else:
        graph = BlockGraph.of(problem)
        back = [
            (a, b)
            for b, bits in enumerate(graph.before)
            for a in members(bits)
            if stages[a] > stages[b]
        ]
        if back:
            why = f"Block {back[0][1]} reads from block {back[0][0]} of a later stage."
    check_choice(why)


def _faults(problem: PartitionProblem, choice: StageGraphChoice) -> list[str]:
    """Return violated constraints other than memory, as text."""
    faults = list_forbidden(problem, choice.stages, choice.schedule)
    faults.extend(
        f"cut after block {b}"
        for b in sorted({*problem.no_cut_after})
        if b + 1 < len(choice.stage_of) and choice.stage_of[b] != choice.stage_of[b + 1]
    )
    return faults
