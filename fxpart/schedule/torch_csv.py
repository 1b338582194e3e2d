"""Schedules in the CSV format of torch.distributed.pipelining: a row per rank.

Its grammar is ours without peers (a transfer goes to the adjacent stage) and without weight
versions. It also has actions for sharded parameters, which have no equivalent here, and pairs of
actions that overlap.
"""

from __future__ import annotations

import csv
import io
import re

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, ActionKind, Schedule, default_peer, parse_scheduled
from fxpart.schedule.text import MOST_PROBLEMS

# Actions of torch on sharded parameters and data-parallel gradients, which are skipped.
_PARAMETERS = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """Return the schedule as CSV, lowered or not, as it is.

    torch loads it with format "compute_comms" or "compute_only". Raises FXP109 for everything that
    the format cannot express: a transfer that skips a stage, a weight version, replicated stages.
    """
    problems: list[Problem] = []
    if schedule.replicas:
        problems.append(
            Problem("FXP109", "schedule", "The format of torch has no replicated stages.", "")
        )
    for action in (a for actions in schedule.ranks for a in actions):
        skips = action.peer is not None and action.peer != default_peer(action.stage, action.kind)
        if skips or action.version is not None:
            what = "transfers between nonadjacent stages" if skips else "weight versions"
            problems.append(
                Problem("FXP109", f"action {action}", f"The format of torch has no {what}.", "")
            )
    if problems:
        raise FxpartError(problems)
    text = io.StringIO()
    writer = csv.writer(text)
    for actions in schedule.ranks:
        writer.writerow([str(action) for action in actions])
    return text.getvalue()


def from_torch_csv(text: str, name: str) -> Schedule:
    """Return the schedule in the CSV, with the given name; idle cells are dropped.

    Overlapped pairs run one after the other; actions on sharded parameters are skipped. Stages,
    ranks and microbatches are inferred. Raises FXP303 with every cell that is not an action, at
    most about a hundred.
    """
    problems: list[Problem] = []
    ranks: list[tuple[Action, ...]] = []
    for rank, row in enumerate(_read_cells(text)):
        actions: list[Action] = []
        for cell in row:
            pair = _OVERLAPPED.fullmatch(cell.strip())
            for token in pair[1].split(";") if pair else [cell]:
                if len(problems) >= MOST_PROBLEMS:
                    raise FxpartError(problems)
                if not token.strip() or _PARAMETERS.fullmatch(token.strip()):
                    continue
                try:
                    actions.append(parse_scheduled(token))
                except FxpartError as failure:
                    problems += [
                        Problem(p.code, f"row {rank}, {p.where}", p.why, p.fix)
                        for p in failure.problems
                    ]
        ranks.append(tuple(actions))
    return _infer(name, ranks, problems)


def _read_cells(text: str) -> list[list[str]]:
    """Return the cells; raise FXP303 if the text is not valid CSV."""
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as why:
        raise FxpartError(Problem("FXP303", "schedule CSV", str(why), "")) from why


def _infer(name: str, ranks: list[tuple[Action, ...]], problems: list[Problem]) -> Schedule:
    """Infer stages, their ranks and the number of microbatches from the actions."""
    where: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if where.setdefault(action.stage, rank) != rank:
                why = f"Stage {action.stage} is on ranks {where[action.stage]} and {rank}."
                problems.append(Problem("FXP303", f"row {rank}, action {str(action)!r}", why, ""))
    if (not problems and sorted(where) != list(range(len(where)))) or not where:
        problems.append(
            Problem(
                "FXP303", "schedule CSV", "The stages are not numbered 0, 1, ... without gaps.", ""
            )
        )
    microbatches = {a.microbatch for actions in ranks for a in actions if a.kind is ActionKind.F}
    known = bool(microbatches) and sorted(microbatches) == list(range(len(microbatches)))
    if not problems and not known:
        problems.append(
            Problem(
                "FXP303",
                "schedule CSV",
                "The microbatches with a forward are not numbered 0, 1, ... without gaps.",
                "",
            )
        )
    if problems:
        raise FxpartError(problems)
    stage_rank = tuple(where[stage] for stage in range(len(where)))
    return Schedule(name, len(where), len(microbatches), tuple(ranks), stage_rank)
