"""Schedules in the CSV that torch.distributed.pipelining reads and writes: a row per rank.

Their grammar is ours without peers (a transfer goes to the neighbouring stage) and without weight
versions; it has actions for sharded parameters that mean nothing here, and pairs of actions that
run overlapped.
"""

from __future__ import annotations

import csv
import io
import re

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, ActionKind, Schedule, default_peer, parse
from fxpart.schedule.text import MOST_PROBLEMS

# Their actions on sharded parameters and data-parallel gradients: no part of a schedule's order.
_PARAMETERS = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """The schedule as CSV; lowered or not, as it is.

    Load it there with format "compute_comms" or "compute_only". Raises FXP109 with all that
    the format cannot say: a transfer that skips a stage, a weight version, copies of stages.
    """
    problems: list[Problem] = []
    if schedule.replicas:
        problems.append(Problem("FXP109", "schedule", "torch's format has no copies of stages", ""))
    for action in (a for actions in schedule.ranks for a in actions):
        skips = action.peer is not None and action.peer != default_peer(action.stage, action.kind)
        if skips or action.version is not None:
            what = "transfers to stages that are not neighbours" if skips else "weight versions"
            problems.append(
                Problem("FXP109", f"action {action}", f"torch's format has no {what}", "")
            )
    if problems:
        raise FxpartError(problems)
    text = io.StringIO()
    writer = csv.writer(text)
    for actions in schedule.ranks:
        writer.writerow([str(action) for action in actions])
    return text.getvalue()


def from_torch_csv(text: str, name: str) -> Schedule:
    """The schedule in the CSV, under the name given; idle cells are dropped.

    Overlapped pairs are taken one after the other; actions on sharded parameters are left out.
    Stages, ranks and microbatches are those that occur. Raises FXP303 with every cell that is
    no action, the first hundred at least.
    """
    problems: list[Problem] = []
    ranks: list[tuple[Action, ...]] = []
    for rank, row in enumerate(_rows(text)):
        actions: list[Action] = []
        for cell in row:
            pair = _OVERLAPPED.fullmatch(cell.strip())
            for word in pair[1].split(";") if pair else [cell]:
                if len(problems) >= MOST_PROBLEMS:
                    raise FxpartError(problems)
                if not word.strip() or _PARAMETERS.fullmatch(word.strip()):
                    continue
                try:
                    actions.append(parse(word))
                except FxpartError as failure:
                    problems += [
                        Problem(p.code, f"row {rank}, {p.where}", p.why, p.fix)
                        for p in failure.problems
                    ]
        ranks.append(tuple(actions))
    return _inferred(name, ranks, problems)


def _rows(text: str) -> list[list[str]]:
    """The cells; raises FXP303 where they cannot be told apart."""
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as why:
        raise FxpartError(Problem("FXP303", "schedule CSV", str(why), "")) from why


def _inferred(name: str, ranks: list[tuple[Action, ...]], problems: list[Problem]) -> Schedule:
    """Stages, their ranks and the number of microbatches, from the actions."""
    where: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if where.setdefault(action.stage, rank) != rank:
                why = f"stage {action.stage} is on ranks {where[action.stage]} and {rank}"
                problems.append(Problem("FXP303", f"row {rank}, action {str(action)!r}", why, ""))
    if (not problems and sorted(where) != list(range(len(where)))) or not where:
        problems.append(Problem("FXP303", "schedule CSV", "not every stage from 0 on occurs", ""))
    microbatches = {a.microbatch for actions in ranks for a in actions if a.kind is ActionKind.F}
    known = bool(microbatches) and sorted(microbatches) == list(range(len(microbatches)))
    if not problems and not known:
        problems.append(
            Problem("FXP303", "schedule CSV", "not every microbatch from 0 on has a forward", "")
        )
    if problems:
        raise FxpartError(problems)
    stage_rank = tuple(where[stage] for stage in range(len(where)))
    return Schedule(name, len(where), len(microbatches), tuple(ranks), stage_rank)
