"""The table that nccl-tests print, of any version: columns are found by the header's words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fxpart.cluster.importers.nccl_run import NcclTestRun, describe_run
from fxpart.cluster.importers.source_facts import (
    count,
    format_location,
    lines,
    make_import_error,
    number,
)

_RANK = re.compile(
    r"#\s*Rank\s+(\d{1,6})\s+(?:Group\s+(\d{1,6})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d{1,6})"
    r"\s+\[[^\]]*\]\s*(.*)"
)
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_VERSION = re.compile(r"NCCL version[: ]+(\S+)", re.IGNORECASE)


@dataclass
class _NcclRunBuilder:
    """A run that is being read."""

    program: str = ""
    version: str = ""
    columns: list[str] = field(default_factory=list)
    ranks: list[tuple[int, int, str, int, str]] = field(default_factory=list)
    times: list[tuple[int, float]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    where: str = ""


def looks_like(text: str) -> bool:
    """Whether a text has the header of the table."""
    return any(_header(line) for line in lines(text[: 1 << 20]))


def parse(text: str) -> list[NcclTestRun]:
    """Every run in the text, at least one; FXP407 with the line where it is none."""
    runs: list[NcclTestRun] = []
    now = _NcclRunBuilder()
    for place, line in enumerate(lines(text), 1):
        if now.times and _begins(line):
            runs.append(_closed(now))
            now = _NcclRunBuilder(version=now.version)
        if match := _RANK.match(line):
            rank, group, host, device, product = match.groups()
            now.ranks.append((int(rank), int(group or 0), host, int(device), product.strip()))
        elif columns := _header(line):
            if not now.where:
                now.where = format_location(place, line)
            now.columns = columns
        elif now.columns and re.match(r"\s*\d", line):
            _row(now, place, line)
        elif match := _PROGRAM.search(line):
            now.program = now.program if now.times else match[1]
        elif match := _VERSION.search(line):
            now.version = match[1]
    if now.times or not runs:
        runs.append(_closed(now))
    return runs


def _begins(line: str) -> bool:
    """Whether a line after a table is the start of the next run: its command or its heading."""
    if "concluded" in line:
        return False
    return bool(_RANK.match(line) or _PROGRAM.search(line) or "nThread" in line)


def _header(line: str) -> list[str]:
    """The columns of the table; [] where the line is no header."""
    words = line.replace("#wrong", "wrong").replace("#", " ").split()
    whole = words[:2] == ["size", "count"] and ("time" in words or "cputime" in words)
    return words if whole else []


def _row(now: _NcclRunBuilder, place: int, line: str) -> None:
    """Add one line of the table: its size, and its time out of place, else in place."""
    words = line.split()
    first = next(i for i, word in enumerate(now.columns) if word in ("time", "cputime"))
    # Texts between count and time may be blank, and the half out of place may be missing.
    later = len(now.columns) - first
    halves = [i for i, word in enumerate(now.columns) if word in ("time", "cputime")]
    half = halves[1] - halves[0] if len(halves) > 1 else later
    numbers = [word for word in words[2:] if re.match(r"[-+.\d]|nan|inf|N/A", word)]
    tail = words[2:][-later:] if len(numbers) >= later else words[2:][-half:]
    if len(tail) < half or len(words) < 3 + half:
        why = f"the line has {len(words)} columns, the header {len(now.columns)}"
        raise make_import_error(format_location(place, line), why, "give the whole table")
    size, time = (
        count(words[0], format_location(place, line)),
        number(tail[0], format_location(place, line)),
    )
    if time < 0 or (size and not time):
        raise make_import_error(
            format_location(place, line), f"{size} bytes in {time:g} us cannot be"
        )
    if not size:
        return  # less than one element for each rank: nothing was sent
    now.times.append((size, time * 1e-6))
    now.kinds.add(" ".join(word for word in words[2:4] if not re.match(r"[-\d]", word)))


def _closed(now: _NcclRunBuilder) -> NcclTestRun:
    """The run as it stands at its end; FXP407 where something is missing."""
    where = now.where or "the text"
    if not now.columns:
        raise make_import_error(
            "the text", "there is no header with the columns size, count, ..., time"
        )
    if not now.times:
        raise make_import_error(where, "no line of numbers follows the header")
    if not now.ranks:
        why = 'the lines "#  Rank  0 ... on HOST device ..." are missing: which ranks took part?'
        raise make_import_error(where, why, "keep what the program prints before the table")
    group = [rank for rank in sorted(now.ranks) if rank[1] == min(r[1] for r in now.ranks)]
    products = tuple(rank[4] for rank in group)
    return NcclTestRun(
        program=now.program,
        ranks=len(group),
        hosts=len({rank[2] for rank in group}),
        times=tuple(now.times),
        where=where,
        source=describe_run(now.program, products, now.kinds, now.version),
        places=tuple((rank[2], rank[3]) for rank in group),
        products=products,
    )
