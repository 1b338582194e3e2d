"""Describe stages, decisions and differences for plans and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum

from fxpart import units
from fxpart.plan.prediction import RankPrediction, StepParts, step_parts
from fxpart.planner.prediction.joint_prediction import entries
from fxpart.solver.joint.objective import JointEvaluation, degrees
from fxpart.solver.joint.problem import JointChoice, JointProblem
from fxpart.solver.schedule_costs import get_fill_fraction

_SAME = 5e-4  # smaller relative differences are not reported


def label(blocks: Sequence[str]) -> str:
    """Return the label of a run of blocks: the first and the last name."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def find_overfull_stages(evaluation: JointEvaluation) -> list[int]:
    """Return the stages that need more memory than is available."""
    return [k for k, s in enumerate(evaluation.stages) if s.memory.total > s.memory_limit]


def decisions(problem: JointProblem, choice: JointChoice) -> str:
    """Return the degrees of a choice, "dp8 tp4 zero1"; those of most stages where they differ."""
    used = Counter(degrees(problem, option) for option in choice.options)
    ((data, tensor, expert, zero, recompute, context, shards, host), _), *others = (
        used.most_common()
    )
    words = [f"dp{data}", f"tp{tensor}"]
    words += [f"cp{context}"] if context > 1 else []
    words += [f"ep{expert}"] if expert > 1 else []
    words += [f"zero{zero}"] if zero else []
    words += [f"shard{shards}"] if shards else []
    words += [f"recompute {recompute}"] if recompute != "none" else []
    words += [f"offload {host}"] if host != "none" else []
    return " ".join(words) + (f", and {len(others)} other" if others else "")


def explain_joint_rejection(
    chosen: tuple[JointChoice, JointEvaluation],
    other: tuple[JointChoice, JointEvaluation],
    scale: float = 1.0,
) -> str:
    """Return :func:`explain_rejection` for a joint choice. scale: factor on its seconds."""
    rows, best = (entries(found, [()] * len(found.stages)) for _, found in (other, chosen))
    return explain_rejection(_parts(*chosen, best), _parts(*other, rows), rows, scale)


def explain_rejection(
    was: StepParts, now: StepParts, rows: Sequence[RankPrediction], scale: float = 1.0
) -> str:
    """Describe why a choice was rejected: memory, or the part of the step that grows most.

    was, now: the components of the step time of the selected and of the rejected choice. rows: the
    stages of the rejected one.
    """
    full = [row for row in rows if row.tensors > row.memory_limit]
    if full:
        worst = max(full, key=lambda row: row.tensors - row.memory_limit)
        more = f"; {units.plural(len(full) - 1, 'other stage')} too" if full[1:] else ""
        return (
            f"stage {worst.stage} needs {units.size(worst.tensors)} of "
            f"{units.size(worst.memory_limit)}{more}"
        )
    before, after = was.named(), now.named()
    best, seconds = fsum(before.values()), fsum(after.values())
    if abs(seconds - best) < _SAME * best:
        return "equal step time"
    if seconds < best:
        return "not found within the time limit"
    most = max(after, key=lambda name: after[name] - before[name])
    new, old = (units.seconds(scale * parts[most]) for parts in (after, before))
    return f"{most}: {new} instead of {old}"


def _parts(
    choice: JointChoice, evaluation: JointEvaluation, rows: Sequence[RankPrediction]
) -> StepParts:
    """Return the components of the choice's step time."""
    m, stages = choice.microbatches, len(evaluation.stages)
    share = get_fill_fraction(choice.schedule, m, stages, choice.virtual)
    return step_parts(rows, m, share, evaluation.seconds)
