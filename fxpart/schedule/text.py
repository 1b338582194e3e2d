"""Schedules as text: a head line, then one line per rank. Reading inverts writing.

::

    fxpart-schedule 1f1b stages=2 microbatches=2 stage_rank=0,1
    0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1: 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1

With replicated stages the head ends in their groups: ``replicas=1,2|3,4,5``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError, Problem
from fxpart.schedule.action import Action, Schedule, StageEdge, list_group_stages, parse_scheduled
from fxpart.schedule.dependence import Dependence, chain
from fxpart.schedule.lower import compute_times

if TYPE_CHECKING:
    from fxpart.schedule.action import Schedule


_NAME = r"[a-z0-9][a-z0-9_-]{0,39}"
_HEAD = re.compile(
    "fxpart-schedule (" + _NAME + r") stages=([0-9]{1,9}) microbatches=([0-9]{1,9})"
    r" stage_rank=([0-9]{1,9}(?:,[0-9]{1,9})*)"
    r"(?: replicas=([0-9]{1,9}(?:,[0-9]{1,9})*(?:\|[0-9]{1,9}(?:,[0-9]{1,9})*)*))?"
)
MOST_PROBLEMS = 100  # reported for an invalid text; further ones would be similar
_RANK = re.compile(r"([0-9]{1,9}):(.*)")


def is_name(token: str) -> bool:
    """Return whether a schedule may have that name: lower-case letters, digits, - and _."""
    return re.fullmatch(_NAME, token) is not None


def to_text(schedule: Schedule) -> str:
    """Return the schedule as text, ending in a newline."""
    assert is_name(schedule.name), "invalid schedule name"
    placed = ",".join(str(rank) for rank in schedule.stage_rank)
    head = (
        f"fxpart-schedule {schedule.name} stages={schedule.stages}"
        f" microbatches={schedule.microbatches} stage_rank={placed}"
    )
    if schedule.replicas:
        groups = (",".join(str(stage) for stage in group) for group in schedule.replicas)
        head += f" replicas={'|'.join(groups)}"
    lines = [
        f"{rank}: {' '.join(str(action) for action in actions)}".rstrip()
        for rank, actions in enumerate(schedule.ranks)
    ]
    return "\n".join([head, *lines]) + "\n"


def from_text(text: str) -> Schedule:
    """Return the schedule in the text; blank lines and lines starting with # are skipped.

    Raises FXP303 with every error in the text, at most about a hundred. The verifier checks whether
    the schedule is safe to run.
    """
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    head = _HEAD.fullmatch(lines[0][1]) if lines else None
    if head is None:
        raise _make_error(1, "The head line 'fxpart-schedule NAME stages=N ...' is missing.")
    name, stages, microbatches, placed, copies = head.groups()
    stage_rank = tuple(int(rank) for rank in placed.split(","))
    groups = copies.split("|") if copies else []
    replicas = tuple(tuple(int(stage) for stage in group.split(",")) for group in groups)
    problems: list[Problem] = []
    ranks: list[tuple[Action, ...]] = []
    for number, line in lines[1:]:
        if len(problems) >= MOST_PROBLEMS:
            raise FxpartError(problems)
        match = _RANK.fullmatch(line)
        if match is None or int(match[1]) != len(ranks):
            problems += _make_error(number, f"A line '{len(ranks)}: ...' is expected.").problems
            continue
        actions: list[Action] = []
        for token in match[2].split():
            if len(problems) >= MOST_PROBLEMS:
                break
            try:
                actions.append(parse_scheduled(token))
            except FxpartError as failure:
                problems += [_add_line(number, problem) for problem in failure.problems]
        ranks.append(tuple(actions))
    problems += _check_sizes(int(stages), int(microbatches), stage_rank, replicas, ranks)
    if problems:
        raise FxpartError(problems)
    return Schedule(name, int(stages), int(microbatches), tuple(ranks), stage_rank, replicas)


def _check_sizes(
    stages: int,
    microbatches: int,
    stage_rank: tuple[int, ...],
    replicas: tuple[tuple[int, ...], ...],
    ranks: list[tuple[Action, ...]],
) -> list[Problem]:
    """Check that head and lines agree, so that later work is bounded by the size of the text."""
    problems: list[Problem] = []
    if len(stage_rank) != stages or stages < 1:
        problems += _make_error(
            1, f"stage_rank has {len(stage_rank)} entries, but stages={stages}."
        ).problems
    if any(rank >= len(ranks) for rank in stage_rank):
        problems += _make_error(
            1, f"stage_rank has a rank that is not among the {len(ranks)} listed."
        ).problems
    copies = [stage for group in replicas for stage in list_group_stages(group)]
    if len(set(copies)) < len(copies) or any(stage >= stages for stage in copies):
        why = f"Each of stages 0..{stages - 1} may be in one group of replicas only."
        problems += _make_error(1, why).problems
    count = sum(len(actions) for actions in ranks)
    # number of groups; together the stages of each run every microbatch
    different = max(stages - len(copies), 0) + len(replicas)
    if microbatches < 1 or different * microbatches > count:
        why = f"{count} actions are too few for stages={stages} and microbatches={microbatches}."
        problems += _make_error(1, why).problems
    return problems


def _add_line(number: int, problem: Problem) -> Problem:
    return Problem(problem.code, f"line {number}, {problem.where}", problem.why, problem.fix)


def _make_error(number: int, why: str) -> FxpartError:
    return FxpartError(
        Problem("FXP303", f"schedule text, line {number}", why, "Write the schedule with to_text.")
    )


def draw(schedule: Schedule, edges: Iterable[StageEdge] | None = None) -> str:
    """Return a diagram: a line per rank, a column per tick (forward 1, backward 2, transfer 0).

    ``F0`` forward of microbatch 0, ``B0``, ``I0``, ``W0`` backwards, ``==`` the same action
    continues, ``.`` idle. With several stages per rank the stage precedes the kind: ``2F0``. edges:
    the stage graph, a chain by default. Lines have no trailing space and the text no final newline.
    """
    wanted = chain(schedule.stages) if edges is None else tuple(edges)
    only = tuple(tuple(a.plain for a in r if a.kind.is_compute) for r in schedule.ranks)
    bare = replace(schedule, ranks=only)
    times = compute_times(bare, Dependence.of(bare, wanted))
    several = len(set(schedule.stage_rank)) < schedule.stages
    rows = [[(*times[a], _label(a, several)) for a in actions] for actions in only]
    width = max((len(label) for row in rows for *_, label in row), default=1)
    end = max((stop for row in rows for _, stop, _ in row), default=0)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["."] * end
        for start, stop, label in row:
            cells[start:stop] = [label] + ["=" * width] * (stop - start - 1)
        lines.append(f"{rank} | " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, several: bool) -> str:
    label = f"{action.kind.value}{action.microbatch}"
    return f"{action.stage}{label}" if several else label
