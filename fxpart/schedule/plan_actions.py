"""A schedule that a solver found, as a plan holds it: one line of computations per rank.

``("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")``; transfers are added where it is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, ActionKind, Schedule, parse
from fxpart.schedule.make import truncate_schedule
from fxpart.schedule.spec import FOUND


def format_plan_actions(schedule: Schedule) -> tuple[str, ...]:
    """The computations of each rank, as text; transfers are left out."""
    return tuple(
        " ".join(str(action) for action in actions if action.kind.is_compute)
        for actions in schedule.ranks
    )


def parse_plan_actions(
    actions: Sequence[str], stage_rank: Sequence[int], microbatches: int, count: int | None = None
) -> Schedule:
    """The schedule that the lines describe, for its first ``count`` microbatches (all of them).

    stage_rank: the rank of each stage. microbatches: for how many the lines are. Raises FXP303
    with every fault of the lines (a word that is no computation, one on another rank than its
    stage, one that is missing or there twice), FXP109 for a count out of range. Whether the order
    is safe is the verifier's question.
    """
    ranks: list[tuple[Action, ...]] = []
    problems: list[Problem] = []
    for rank, line in enumerate(actions):
        found: list[Action] = []
        for word in line.split():
            try:
                found.append(_read(word, rank, stage_rank, microbatches))
            except FxpartError as failure:
                problems += failure.problems
        ranks.append(tuple(found))
    if set(stage_rank) != set(range(len(ranks))):
        why = f"{len(ranks)} lines for stages on ranks {tuple(stage_rank)}"
        problems.append(_fault("actions", why))
    if not problems:
        problems += _complete(ranks, len(stage_rank), microbatches)
    if problems:
        raise FxpartError(problems)
    whole = Schedule(FOUND, len(stage_rank), microbatches, tuple(ranks), tuple(stage_rank))
    return whole if count is None else truncate_schedule(whole, count)


def _read(word: str, rank: int, stage_rank: Sequence[int], microbatches: int) -> Action:
    """One computation on its rank; raises FXP303."""
    try:
        action = parse(word)
    except FxpartError as failure:
        raise FxpartError(
            [Problem(p.code, f"line {rank}, {p.where}", p.why, p.fix) for p in failure.problems]
        ) from None
    where = f"line {rank}, action {word[:60]!r}"
    if not action.kind.is_compute:
        raise FxpartError(_fault(where, "only computations stand here, no transfers"))
    if action.version is not None:
        raise FxpartError(_fault(where, "it names a weight version"))
    if action.stage >= len(stage_rank) or stage_rank[action.stage] != rank:
        raise FxpartError(_fault(where, f"stage {action.stage} is not on rank {rank}"))
    if action.microbatch >= microbatches:
        raise FxpartError(_fault(where, f"there are only {microbatches} microbatches"))
    return action


def _complete(ranks: Sequence[Sequence[Action]], stages: int, microbatches: int) -> list[Problem]:
    """Each stage takes each microbatch forward once and back once, in one piece or in two."""
    counts = Counter(action for actions in ranks for action in actions)
    problems = [
        _fault(f"action {action}", f"it is there {times} times")
        for action, times in counts.items()
        if times > 1
    ]
    expected = stages * microbatches
    if sum(action.kind is ActionKind.F for action in counts) < expected:
        problems.append(_fault("actions", f"they have not all {expected} forwards"))
        return problems  # the sizes are the text's own from here on, not those of a number in it
    for stage in range(stages):
        for m in range(microbatches):
            kinds = {
                k for k in (ActionKind.B, ActionKind.I, ActionKind.W) if counts[Action(stage, k, m)]
            }
            if kinds not in ({ActionKind.B}, {ActionKind.I, ActionKind.W}):
                there = ", ".join(sorted(k.value for k in kinds)) or "none"
                why = f"backward is B, or I and W: there is {there}"
                problems.append(_fault(f"stage {stage}, microbatch {m}", why))
    return problems


def _fault(where: str, why: str) -> Problem:
    return Problem("FXP303", f"found schedule, {where}", why, "plan again")
