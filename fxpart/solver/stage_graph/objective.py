"""What a graph of stages costs: the chain's objective, with the longest path for the sum.

    T = longest path of t_s over the stage graph + max_s((m - 1) t_s + beta_s)

A stage has min(m, depth) microbatches in flight under 1F1B, depth the number of stages on the
longest path from it to an end, itself included; m under GPipe. Where the stages form a chain this
is :func:`fxpart.solver.objective.evaluate` to the last bit. Like there, T is exact for stages of
equal forward and backward, and for others search's measure; simulating the schedule gives the time
of a plan.
"""

from __future__ import annotations

from math import fsum

from fxpart.errors import error
from fxpart.schedule.spec import SCHEDULES
from fxpart.solver.objective import PartitionEvaluation, PartitionScorer, in_flight
from fxpart.solver.problem import PartitionChoice, PartitionProblem
from fxpart.solver.stage_graph.block_graph import BlockGraph, members, regroup
from fxpart.solver.stage_graph.problem import StageGraphChoice


def evaluate(problem: PartitionProblem, choice: StageGraphChoice) -> PartitionEvaluation:
    """The one definition of what ``choice`` costs; blocks are counted in the choice's order.

    Raises FXP109 for a choice that is no acyclic graph of stages of this problem; one that merely
    breaks a constraint or a memory limit is evaluated, with its faults.
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
        scorer.stage(variant, k, first, last, in_flight(choice.schedule, m, deep[k], 0))
        for k, (first, last) in enumerate(zip(starts, ends, strict=True))
    )
    path = longest_path([s.seconds for s in stages], later)
    longest = max((m - 1) * s.seconds + s.step_only_seconds for s in stages)
    found = _faults(problem, choice)
    found += [
        f"stage {k} needs {s.needed} bytes, {problem.devices[k].name} has {s.memory_limit}"
        for k, s in enumerate(stages)
        if s.needed > s.memory_limit
    ]
    seconds = fsum(stages[k].seconds for k in path) + longest
    return PartitionEvaluation(seconds=seconds, stages=stages, faults=tuple(found))


def convert_chain_choice(problem: PartitionProblem, choice: PartitionChoice) -> StageGraphChoice:
    """A chain's choice as stages of a graph: the same blocks on the same stages."""
    ends = (*choice.starts[1:], len(problem.blocks))
    sizes = [end - start for start, end in zip(choice.starts, ends, strict=True)]
    return StageGraphChoice(
        variant=choice.variant,
        schedule=choice.schedule,
        stage_of=tuple(k for k, size in enumerate(sizes) for _ in range(size)),
    )


def stage_edges(problem: PartitionProblem, stage_of: tuple[int, ...]) -> list[set[int]]:
    """Per stage the stages that read its values."""
    later: list[set[int]] = [set() for _ in range(max(stage_of) + 1)]
    for value in problem.values:
        source = stage_of[value.producer]
        later[source] |= {stage_of[c] for c in value.consumers} - {source}
    return later


def depths(later: list[set[int]]) -> list[int]:
    """Per stage the stages on the longest path from it to an end, itself included."""
    found = [1] * len(later)
    for k in reversed(range(len(later))):
        found[k] = 1 + max((found[q] for q in later[k]), default=0)
    return found


def longest_path(seconds: list[float], later: list[set[int]]) -> list[int]:
    """The stages of a longest path, in order; of equally long ones that of the lowest stages."""
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
    """Refuse a choice whose numbers do not belong to the problem at all."""
    stages, why = choice.stage_of, ""
    if len(stages) != len(problem.blocks) or {*stages} != {*range(len({*stages}))}:
        why = f"{len(stages)} blocks on stages {sorted({*stages})} for {len(problem.blocks)} blocks"
    elif len({*stages}) > len(problem.devices):
        why = f"{len({*stages})} stages do not fit on {len(problem.devices)} devices"
    elif not 0 <= choice.variant < len(problem.variants):
        why = f"variant {choice.variant} is not one of {len(problem.variants)}"
    elif choice.schedule not in SCHEDULES:
        why = f"there is no schedule {choice.schedule!r}"
    else:
        graph = BlockGraph.of(problem)
        back = [
            (a, b)
            for b, bits in enumerate(graph.before)
            for a in members(bits)
            if stages[a] > stages[b]
        ]
        if back:
            why = f"block {back[0][1]} reads from block {back[0][0]} of a later stage"
    if why:
        raise error("FXP109", where="choice", why=why, fix="give a choice made for this problem")


def _faults(problem: PartitionProblem, choice: StageGraphChoice) -> list[str]:
    """Constraints other than memory that the choice violates, as text."""
    faults = []
    if not problem.min_stages <= choice.stages <= problem.max_stages:
        allowed = f"{problem.min_stages} to {problem.max_stages}"
        faults.append(f"{choice.stages} stages, allowed are {allowed}")
    if choice.schedule not in problem.schedules:
        faults.append(f"schedule {choice.schedule}, allowed are {', '.join(problem.schedules)}")
    faults.extend(
        f"cut after block {b}"
        for b in sorted({*problem.no_cut_after})
        if b + 1 < len(choice.stage_of) and choice.stage_of[b] != choice.stage_of[b + 1]
    )
    return faults
