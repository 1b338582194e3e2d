"""Parse the table that nccl-tests print; columns are found by the header, for all versions."""

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
    """A partially parsed run."""

    program: str = ""
    version: str = ""
    columns: list[str] = field(default_factory=list)
    ranks: list[tuple[int, int, str, int, str]] = field(default_factory=list)
    times: list[tuple[int, float]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    where: str = ""


def looks_like(text: str) -> bool:
    """Return whether a text has the header of the table."""
    return any(_header(line) for line in lines(text[: 1 << 20]))


def parse(text: str) -> list[NcclTestRun]:
    """Parse all runs, at least one; FXP407 names the invalid line."""
    runs: list[NcclTestRun] = []
    run = _NcclRunBuilder()
    for line_number, line in enumerate(lines(text), 1):
        if run.times and _starts_run(line):
            runs.append(_finish(run))
            run = _NcclRunBuilder(version=run.version)
        if match := _RANK.match(line):
            rank, group, host, device, product = match.groups()
            run.ranks.append((int(rank), int(group or 0), host, int(device), product.strip()))
        elif columns := _header(line):
            if not run.where:
                run.where = format_location(line_number, line)
            run.columns = columns
        elif run.columns and re.match(r"\s*\d", line):
            _row(run, line_number, line)
        elif match := _PROGRAM.search(line):
            run.program = run.program if run.times else match[1]
        elif match := _VERSION.search(line):
            run.version = match[1]
    if run.times or not runs:
        runs.append(_finish(run))
    return runs


def _starts_run(line: str) -> bool:
    """Return whether a line after a table starts the next run."""
    if "concluded" in line:
        return False
    return bool(_RANK.match(line) or _PROGRAM.search(line) or "nThread" in line)


def _header(line: str) -> list[str]:
    """Return the columns; [] if the line is not a header."""
    words = line.replace("#wrong", "wrong").replace("#", " ").split()
    whole = words[:2] == ["size", "count"] and ("time" in words or "cputime" in words)
    return words if whole else []


def _row(run: _NcclRunBuilder, line_number: int, line: str) -> None:
    """Add a line of the table: its size and its out-of-place (else in-place) time."""
    words = line.split()
    first = next(i for i, word in enumerate(run.columns) if word in ("time", "cputime"))
    # Texts between count and time may be blank, and the out-of-place half may be missing.
    later = len(run.columns) - first
    halves = [i for i, word in enumerate(run.columns) if word in ("time", "cputime")]
    half = halves[1] - halves[0] if len(halves) > 1 else later
    numbers = [word for word in words[2:] if re.match(r"[-+.\d]|nan|inf|N/A", word)]
    tail = words[2:][-later:] if len(numbers) >= later else words[2:][-half:]
    if len(tail) < half or len(words) < 3 + half:
        why = f"the line has {len(words)} columns, but the header has {len(run.columns)}"
        raise make_import_error(
            format_location(line_number, line), why, "import the complete table"
        )
    size, time = (
        count(words[0], format_location(line_number, line)),
        number(tail[0], format_location(line_number, line)),
    )
    if time < 0 or (size and not time):
        raise make_import_error(
            format_location(line_number, line), f"{size} bytes in {time:g} us is not possible"
        )
    if not size:
        return  # Less than one element per rank, so nothing was sent.
    run.times.append((size, time * 1e-6))
    run.kinds.add(" ".join(word for word in words[2:4] if not re.match(r"[-\d]", word)))


def _finish(run: _NcclRunBuilder) -> NcclTestRun:
    """Return the complete run; FXP407 if something is missing."""
    where = run.where or "the text"
    if not run.columns:
        raise make_import_error(
            "the text", "there is no header with the columns size, count, ..., time"
        )
    if not run.times:
        raise make_import_error(where, "no line of numbers follows the header")
    if not run.ranks:
        why = 'the lines "#  Rank  0 ... on HOST device ..." are missing, so the ranks are unknown'
        raise make_import_error(where, why, "include the lines before the table")
    group = [rank for rank in sorted(run.ranks) if rank[1] == min(r[1] for r in run.ranks)]
    products = tuple(rank[4] for rank in group)
    return NcclTestRun(
        program=run.program,
        ranks=len(group),
        hosts=len({rank[2] for rank in group}),
        times=tuple(run.times),
        where=where,
        source=describe_run(run.program, products, run.kinds, run.version),
        places=tuple((rank[2], rank[3]) for rank in group),
        products=products,
    )
