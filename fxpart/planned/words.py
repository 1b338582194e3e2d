"""Stages, decisions and differences as people read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxpart.planned.predicted import entries
from fxpart.prediction import StepParts, step_parts
from fxpart.report import units
from fxpart.solver.joint.objective import JointEvaluation, degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.joint.schedules import fill

_SAME = 5e-4  # differences below are not told


def label(blocks: Sequence[str]) -> str:
    """Blocks as people name them: the first and the last."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def overfull(evaluation: JointEvaluation) -> list[int]:
    """The stages that need more memory than there is."""
    return [k for k, s in enumerate(evaluation.stages) if s.memory.total > s.memory_limit]


def decisions(problem: JointProblem, choice: JointChoice) -> str:
    """The degrees of a choice in a line: "dp8 tp4 zero1", of most stages where they differ."""
    used = Counter(degrees(problem, option) for option in choice.options)
    ((data, tensor, expert, zero, recompute), _), *others = used.most_common()
    words = [f"dp{data}", f"tp{tensor}"]
    words += [f"ep{expert}"] if expert > 1 else []
    words += [f"zero{zero}"] if zero else []
    words += [f"recompute {recompute}"] if recompute != "none" else []
    return " ".join(words) + (f", and {len(others)} other" if others else "")


def why_lost(
    chosen: tuple[JointChoice, JointEvaluation],
    other: tuple[JointChoice, JointEvaluation],
    scale: float = 1.0,
) -> str:
    """Why the other choice lost, in a sentence: memory, or the part of the step that grows most.

    scale: by what its seconds are multiplied.
    """
    found, best = other[1], chosen[1]
    full = overfull(found)
    if full:
        worst = max(full, key=lambda k: found.stages[k].memory.total - found.stages[k].memory_limit)
        stage = found.stages[worst]
        more = f", and {units.plural(len(full) - 1, 'other stage')} too much" if full[1:] else ""
        return (
            f"stage {worst} needs {units.size(stage.memory.total)} of "
            f"{units.size(stage.memory_limit)}{more}"
        )
    slower = found.seconds / best.seconds - 1 if best.seconds else 0.0
    if abs(slower) < _SAME:
        return "it takes as long"
    if slower < 0:
        return "it was not found in the time that there was"
    was, now = (_parts(*pair).named() for pair in (chosen, other))
    most = max(now, key=lambda name: now[name] - was[name])
    after, before = (units.seconds(scale * parts[most]) for parts in (now, was))
    return f"{most}: {after} instead of {before}"


def _parts(choice: JointChoice, evaluation: JointEvaluation) -> StepParts:
    """What a step of the choice is made of."""
    rows = entries(evaluation, [()] * len(evaluation.stages))
    share = fill(choice.schedule, choice.virtual)
    return step_parts(rows, choice.microbatches, share, evaluation.seconds)
