"""Schedule files (fxpart text or torch CSV, distinguished by content) and stage graphs.

A file lists actions, not the stage graph. :func:`implied_edges` infers the graph of a schedule;
:func:`parse_edges` reads one that the user specifies.
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
_FIX = "Use the schedule text of fxpart or the CSV of torch."
IMPORTED = "imported"  # the name of a schedule that has none of its own


def load(path: str | Path, name: str | None = None) -> Schedule:
    """Return the schedule in a file; name: replaces the name in the text, or "imported" for a CSV.

    Raises FXP301 if the file cannot be read, FXP303 with every error in it, and FXP109 for an
    invalid name.
    """
    return parse_schedule(contents(path), name)


def contents(path: str | Path) -> str:
    """Return the text of a schedule file; raise FXP301 if it cannot be read."""
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8")
    except OSError as why:
        raise error("FXP301", where=str(path), why=why.strerror or str(why), fix=_FIX) from why
    except UnicodeDecodeError as why:
        raise error("FXP301", where=str(path), why="The file is not UTF-8 text.", fix="") from why


def parse_schedule(text: str, name: str | None = None) -> Schedule:
    """Return the schedule of a text or CSV; see :func:`load`."""
    if name is not None and not is_name(name):
        why = "A name consists of lower-case letters, digits, - and _."
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
    """Return whether the text has fxpart's format: its first nonempty line is a head line."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return first.startswith("fxpart-schedule")


def serialize_for_path(schedule: Schedule, path: str | Path) -> str:
    """Return the serialized schedule: CSV of torch for the suffix .csv, otherwise fxpart's text."""
    return to_torch_csv(schedule) if Path(path).suffix.lower() == ".csv" else to_text(schedule)


def units(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the groups of replicas in order; a stage without replicas is a group of one."""
    groups = {stage: list_group_stages(group) for group in schedule.replicas for stage in group}
    found = dict.fromkeys(groups.get(k, (k,)) for k in range(schedule.stages))
    return tuple(found)


def implied_edges(schedule: Schedule) -> tuple[StageEdge, ...]:
    """Infer the stage graph of a schedule.

    A chain, unless its transfers name other pairs of stages. Then the edges are those pairs, plus
    adjacent stages on one rank, which need no transfer. An edge with forward transfers only has no
    backward. Replicas of a stage have equal edges.
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
    silent = there - back  # edges with forward transfers only
    return tuple(
        StageEdge(source, target, (a, b) not in silent)
        for a, b in sorted(pairs)
        for source in groups[a]
        for target in groups[b]
    )


_EDGE = re.compile("([0-9]{1,9})-([0-9]{1,9})(:forward)?")


def parse_edges(text: str) -> tuple[StageEdge, ...]:
    """Parse edges such as ``0-1,1-2,0-2:forward`` (the last has no gradient); raise FXP109."""
    found: list[StageEdge] = []
    problems: list[Problem] = []
    for token in text.split(","):
        match = _EDGE.fullmatch(token.strip())
        if match is None:
            fix = "Write for example 0-1,1-2 or, for an edge without a gradient, 0-2:forward."
            problems.append(
                Problem(
                    "FXP109",
                    f"edge {token[:60]!r}",
                    "The edge is not of the form SOURCE-TARGET.",
                    fix,
                )
            )
        else:
            found.append(StageEdge(int(match[1]), int(match[2]), match[3] is None))
    if problems:
        raise FxpartError(problems)
    return tuple(found)


def edges_text(edges: Iterable[StageEdge]) -> str:
    """Return edges in the format of :func:`parse_edges`."""
    return ",".join(f"{e.source}-{e.target}{'' if e.backward else ':forward'}" for e in edges)
