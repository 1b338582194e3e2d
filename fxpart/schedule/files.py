"""Schedules in files: our text or torch's CSV, told apart by what is in them; and stage graphs.

A file lists actions, not the stage graph that they are for. :func:`implied_edges` says which graph
a schedule seems to be for; whoever knows better gives the edges (:func:`parse_edges`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fxpart.errors import FxpartError, Problem, error
from fxpart.files import read_bytes
from fxpart.schedule.action import FORWARD, ActionKind, Schedule, StageEdge, list_group_stages
from fxpart.schedule.text import from_text, is_name, to_text
from fxpart.schedule.torch_csv import from_torch_csv, to_torch_csv

MAX_BYTES = 64 << 20
_FIX = "give a schedule's text or CSV"
IMPORTED = "imported"  # the name of a schedule that comes without one


def load(path: str | Path, name: str | None = None) -> Schedule:
    """The schedule in a file; name: in place of the text's own, or of "imported" for a CSV.

    Raises FXP301 where the file cannot be read, FXP303 with every fault of what is in it, FXP109
    for a name that is none.
    """
    return parse_schedule(contents(path), name)


def contents(path: str | Path) -> str:
    """The text of a schedule's file; raises FXP301 where it cannot be read."""
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8")
    except OSError as why:
        raise error("FXP301", where=str(path), why=why.strerror or str(why), fix=_FIX) from why
    except UnicodeDecodeError as why:
        raise error("FXP301", where=str(path), why="it is not UTF-8 text", fix="") from why


def parse_schedule(text: str, name: str | None = None) -> Schedule:
    """The schedule that a text or CSV says; see :func:`load`."""
    if name is not None and not is_name(name):
        why = "a name is a lower-case word of letters, digits, - and _"
        raise error("FXP109", where=f"name {name[:60]!r}", why=why, fix="")
    if is_text(text):
        found = from_text(text)
        return found if name is None else replace(found, name=name)
    found = from_torch_csv(text, name or IMPORTED)
    if name is None and not any(a.kind in _BACKWARD for r in found.ranks for a in r):
        return replace(found, name=FORWARD)
    return found


_BACKWARD = (ActionKind.B, ActionKind.I, ActionKind.W)


def is_text(text: str) -> bool:
    """Whether it is our form: its first line that says anything is a head line."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("fxpart-schedule")


def serialize_for_path(schedule: Schedule, path: str | Path) -> str:
    """The schedule in the form that the file's name asks for: .csv is torch's, others are ours."""
    return to_torch_csv(schedule) if Path(path).suffix.lower() == ".csv" else to_text(schedule)


def units(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The stages with their copies, in order; one that has none is alone."""
    groups = {stage: list_group_stages(group) for group in schedule.replicas for stage in group}
    found = dict.fromkeys(groups.get(k, (k,)) for k in range(schedule.stages))
    return tuple(found)


def implied_edges(schedule: Schedule) -> tuple[StageEdge, ...]:
    """The stage graph that a schedule seems to be for.

    A chain, unless its transfers name other pairs of stages: then the pairs that they name, and
    neighbours on one rank, between which nothing is sent. An edge over which values go but no
    gradient comes back has no backward. Copies of a stage are joined alike.
    """
    groups = units(schedule)
    unit = {stage: place for place, group in enumerate(groups) for stage in group}
    there: set[tuple[int, int]] = set()
    back: set[tuple[int, int]] = set()
    for action in (a for actions in schedule.ranks for a in actions):
        if action.peer in unit and action.stage in unit:
            ends = unit[action.stage], unit[action.peer]
            if action.kind is ActionKind.SEND_F:
                there.add(ends)
            elif action.kind is ActionKind.SEND_B:
                back.add(ends[::-1])
    chain = {(k, k + 1) for k in range(len(groups) - 1)}
    if there <= chain:
        pairs = chain
    else:
        ranks = [{schedule.stage_rank[k] for k in group} for group in groups]
        pairs = there | {(a, b) for a, b in chain if ranks[a] == ranks[b]}
    silent = there - back  # values go, and nothing comes back
    return tuple(
        StageEdge(source, target, (a, b) not in silent)
        for a, b in sorted(pairs)
        for source in groups[a]
        for target in groups[b]
    )


_EDGE = re.compile("([0-9]{1,9})-([0-9]{1,9})(:forward)?")


def parse_edges(text: str) -> tuple[StageEdge, ...]:
    """Edges from text such as ``0-1,1-2,0-2:forward`` (the last without a gradient); FXP109."""
    found: list[StageEdge] = []
    problems: list[Problem] = []
    for word in text.split(","):
        match = _EDGE.fullmatch(word.strip())
        if match is None:
            fix = "write 0-1,1-2, and 0-2:forward where no gradient comes back"
            problems.append(
                Problem("FXP109", f"edge {word[:60]!r}", "it is not SOURCE-TARGET", fix)
            )
        else:
            found.append(StageEdge(int(match[1]), int(match[2]), match[3] is None))
    if problems:
        raise FxpartError(problems)
    return tuple(found)


def edges_text(edges: Iterable[StageEdge]) -> str:
    """Edges as :func:`parse_edges` takes them."""
    return ",".join(f"{e.source}-{e.target}{'' if e.backward else ':forward'}" for e in edges)
