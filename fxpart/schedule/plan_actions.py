"""Searched schedules as stored in a plan: one line of computations per rank.

``("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")``; transfers are inserted when the plan is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, ActionKind, Schedule, parse
from fxpart.schedule.make import truncate_schedule
from fxpart.schedule.spec import FOUND


def format_plan_actions(schedule: Schedule) -> tuple[str, ...]:
    """Return the computations of each rank as text, without transfers."""
    return tuple(
        " ".join(str(action) for action in actions if action.kind.is_compute)
        for actions in schedule.ranks
    )


def parse_plan_actions(
    actions: Sequence[str], stage_rank: Sequence[int], microbatches: int, count: int | None = None
) -> Schedule:
    """Return the schedule in the lines, truncated to its first ``count`` microbatches (default:
    all).

    stage_rank: the rank of each stage. microbatches: the number that the lines are for. Raises
    FXP303 with every error in the lines (an entry that is not a computation, one on another rank
    than its stage, a missing or duplicate one), FXP109 for a count out of range. The verifier
    checks whether the order is safe.
    """
    ranks: list[tuple[Action, ...]] = []
    problems: list[Problem] = []
    for rank, line in enumerate(actions):
        found: list[Action] = []
        for token in line.split():
            try:
                found.append(_parse_action(token, rank, stage_rank, microbatches))
            except FxpartError as failure:
                problems += failure.problems
        ranks.append(tuple(found))
    if set(stage_rank) != set(range(len(ranks))):
        why = f"There are {len(ranks)} lines for stages on ranks {tuple(stage_rank)}."
        problems.append(_make_problem("actions", why))
    if not problems:
        problems += _find_missing(ranks, len(stage_rank), microbatches)
    if problems:
        raise FxpartError(problems)
    whole = Schedule(FOUND, len(stage_rank), microbatches, tuple(ranks), tuple(stage_rank))
    return whole if count is None else truncate_schedule(whole, count)


def _parse_action(token: str, rank: int, stage_rank: Sequence[int], microbatches: int) -> Action:
    """Return one computation of a rank; raise FXP303."""
    try:
        action = parse(token)
    except FxpartError as failure:
        raise FxpartError(
            [Problem(p.code, f"line {rank}, {p.where}", p.why, p.fix) for p in failure.problems]
        ) from None
    where = f"line {rank}, action {token[:60]!r}"
    if not action.kind.is_compute:
        raise FxpartError(
            _make_problem(where, "A stored schedule has computations only, no transfers.")
        )
    if action.version is not None:
        raise FxpartError(_make_problem(where, "The action names a weight version."))
    if action.stage >= len(stage_rank) or stage_rank[action.stage] != rank:
        raise FxpartError(_make_problem(where, f"Stage {action.stage} is not on rank {rank}."))
    if action.microbatch >= microbatches:
        raise FxpartError(_make_problem(where, f"There are only {microbatches} microbatches."))
    return action


def _find_missing(
    ranks: Sequence[Sequence[Action]], stages: int, microbatches: int
) -> list[Problem]:
    """Check that each stage runs each microbatch once forward and once backward (B, or I and W)."""
    counts = Counter(action for actions in ranks for action in actions)
    problems = [
        _make_problem(f"action {action}", f"The action occurs {times} times.")
        for action, times in counts.items()
        if times > 1
    ]
    expected = stages * microbatches
    if sum(action.kind is ActionKind.F for action in counts) < expected:
        problems.append(_make_problem("actions", f"There are not exactly {expected} forwards."))
        # The sizes are now known to match the text, so a huge number cannot make the loops long.
        return problems
    for stage in range(stages):
        for m in range(microbatches):
            kinds = {
                k for k in (ActionKind.B, ActionKind.I, ActionKind.W) if counts[Action(stage, k, m)]
            }
            if kinds not in ({ActionKind.B}, {ActionKind.I, ActionKind.W}):
                there = ", ".join(sorted(k.value for k in kinds)) or "none"
                why = f"The backward must be B, or I and W; found: {there}."
                problems.append(_make_problem(f"stage {stage}, microbatch {m}", why))
    return problems


def _make_problem(where: str, why: str) -> Problem:
    return Problem("FXP303", f"searched schedule, {where}", why, "Plan again.")
