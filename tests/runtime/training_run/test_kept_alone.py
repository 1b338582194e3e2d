"""A run that goes on in another trainer of one process: as if it had never ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import kept_programs
import pytest
from kept_programs import CASES, EVERY, STREAMS, go

from fxpart.diagnostics.postmortem import examine
from fxpart.runtime.training_run.generations import load_generations
from fxpart.runtime.training_run.ledger import check_ledger, read_updates

pytestmark = pytest.mark.slow
SYNCHRONOUS = [name for name in CASES if name not in STREAMS]


def killed(folder: Path, name: str, at: int) -> None:
    """A generation in a process of its own, which is killed after a step."""
    child = os.fork()
    if not child:
        go(str(folder), name, True, (at, 0, signal.SIGKILL))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_run_that_was_stopped_goes_on(name: str, tmp_path: Path) -> None:
    whole = go(str(tmp_path / "whole"), name, True)
    first = go(str(tmp_path / "parts"), name, True, (4, 0, signal.SIGTERM))
    assert first[:1] + first[2:3] == (4, "SIGTERM to rank 0")
    second = go(str(tmp_path / "parts"), name, True, (7, 0, signal.SIGUSR1))
    assert (second[0], second[2], second[-1]) == (7, "SIGUSR1 to rank 0", 7)
    assert go(str(tmp_path / "parts"), name, True) == whole
    parts, ledger = (read_updates(tmp_path / f / "steps.jsonl") for f in ("parts", "whole"))
    assert parts == ledger and len(ledger) == whole[0]
    told = check_ledger(tmp_path / "parts" / "steps.jsonl")
    assert (told.problems, told.generations, told.redone) == ((), 3, 0)
    # A run that has ended in order has nothing left to do.
    assert go(str(tmp_path / "parts"), name, True) == whole
    generations = load_generations(tmp_path / "parts" / "generations.jsonl")
    assert [g.ended.how for g in generations if g.ended] == [
        "SIGTERM to rank 0", "SIGUSR1 to rank 0", whole[2], whole[2],
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_killed_goes_on(name: str, tmp_path: Path) -> None:
    """Killed before the first checkpoint, between two, and right after one."""
    whole = go(str(tmp_path / "whole"), name, True)
    for at in (2, 5, 6):
        killed(tmp_path / "parts", name, at)
    found = go(str(tmp_path / "parts"), name, True)
    assert found == whole
    parts, ledger = (read_updates(tmp_path / f / "steps.jsonl") for f in ("parts", "whole"))
    assert parts == ledger and len(ledger) == whole[0]
    told = check_ledger(tmp_path / "parts" / "steps.jsonl")
    assert (told.problems, told.generations) == ((), 4) and told.redone >= 3


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_was_stopped_goes_on(name: str, tmp_path: Path) -> None:
    """It is drained where it is saved: a plain loop that drains there has its losses."""
    for at, kind in ((2, signal.SIGTERM), (9, signal.SIGINT)):
        go(str(tmp_path), name, True, (at, 0, kind))
    found = go(str(tmp_path), name, True)
    steps = read_updates(tmp_path / "steps.jsonl")
    ends = {g.ended.step for g in load_generations(tmp_path / "generations.jsonl") if g.ended}
    assert len(ends) == 3 and check_ledger(tmp_path / "steps.jsonl").problems == ()
    drains = ends | set(range(EVERY, found[0], EVERY))
    losses, state = kept_programs.by_hand(name, drains)
    assert [step.loss for step in steps] == losses
    assert found[5] == state


def test_a_run_that_has_ended_in_order_is_nobodys_failure(tmp_path: Path) -> None:
    """Also before its trainer is closed."""
    made = kept_programs.trainer("plain", True)
    made.fit(kept_programs.loader(), steps=2, checkpoints=tmp_path)
    found = examine(tmp_path)
    assert found.first == () and {traces.how for traces in found.ranks.values()} == {"left"}
    made.close()
