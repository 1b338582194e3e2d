"""Training on a device that is not the CPU, without owning one (tests/support/stand_in.py).

A tensor that is created on the wrong device fails here as on a GPU: constants, masks, random
numbers, optimizer state, checkpoints, clipping, batches, metrics, recordings and profiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stand_in_programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "stand_in_programs.py"
FIRST = ("1f1b", "zero 3", "staged", "evaluation", "stash", "record", "waits", "mixed")
REST = tuple(name for name in PROGRAMS if name not in FIRST)
CLOSE = 1e-4  # relative; ranks that add parts of a gradient round otherwise


@cache
def rows(names: tuple[str, ...]) -> dict[str, Any]:
    """Run the programs in one process of their own; the device changes torch for all of it."""
    own = [str(ROOT), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *names], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(own), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
    found = {row["name"]: row for row in map(json.loads, lines)}
    assert set(found) == set(names), done.stderr[-3000:]
    return found


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is inside dicts and lists, with its place."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, f"{where}/{key}")
    else:
        yield where, value


def check(row: dict[str, Any]) -> None:
    """Compare what the device gave with what the CPU gave."""
    assert "error" not in row, row["error"]
    found, wanted = dict(leaves(row["found"])), dict(leaves(row["wanted"]))
    assert found == pytest.approx(wanted, rel=row.get("tolerance", CLOSE), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_like_the_cpu(name: str) -> None:
    check(rows(FIRST)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_every_program_like_the_cpu(name: str) -> None:
    check(rows(REST)[name])
